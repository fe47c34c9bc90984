#!/bin/sh
# Build the host engine with a C++ driver under each sanitizer and run it. Arguments: the sanitizers, by default both.
set -e
cd "$(dirname "$0")/../.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
sources="tests/host/stress.cpp $(ls ncclpy/host/driver/*.cpp ncclpy/host/nccl/*.cpp | grep -v reduce_kernels)"
flags="-std=c++17 -g -O1 -Wall -Wextra -Incclpy/abi -Incclpy/host -pthread"
for sanitizer in ${*:-thread address,undefined}; do
  objects=""
  for variant in baseline: avx2:-mavx2 avx512:"-mavx512f -mavx512bw -mavx512vl -mavx512dq"; do
    name=${variant%%:*}
    if [ "$name" != baseline ] && [ "$(uname -m)" != x86_64 ]; then continue; fi
    # shellcheck disable=SC2086
    ${CXX:-c++} $flags -fsanitize="$sanitizer" -ffp-contract=off ${variant#*:} -DNCCLPY_KERNELS=reduce_"$name" \
      -c ncclpy/host/nccl/reduce_kernels.cpp -o "$build/$name.o"
    objects="$objects $build/$name.o"
  done
  # shellcheck disable=SC2086
  ${CXX:-c++} $flags -fsanitize="$sanitizer" -fno-sanitize-recover=all $sources $objects -o "$build/stress"
  echo "== $sanitizer"
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS-}" UBSAN_OPTIONS=print_stacktrace=1 timeout 300 "$build/stress"
done
