// The part of a C type that the calling convention sees, by which two declarations are compared.
#pragma once

#include <cstddef>
#include <cstdio>
#include <type_traits>

template <std::size_t Size, bool Signed> struct Integer {};
template <std::size_t Size> struct Floating {};
template <std::size_t Size> struct Bytes {};  // struct, union or array
struct Void {};
struct SomeStruct {};
struct SomeFunction {};
template <class T> struct Pointer {};
template <class R, class... A> struct Signature {};

template <class T, class = void> struct Canonical;
template <class T> using Canon = typename Canonical<std::remove_cv_t<T>>::type;

template <> struct Canonical<void> { using type = Void; };
template <class T> struct Canonical<T, std::enable_if_t<std::is_integral_v<T>>> {
  using type = Integer<sizeof(T), std::is_signed_v<T>>;
};
template <class T> struct Canonical<T, std::enable_if_t<std::is_enum_v<T>>> {
  using type = Integer<sizeof(T), std::is_signed_v<std::underlying_type_t<T>>>;
};
template <class T> struct Canonical<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  using type = Floating<sizeof(T)>;
};
template <class T>
struct Canonical<T, std::enable_if_t<std::is_class_v<T> || std::is_union_v<T> || std::is_array_v<T>>> {
  using type = Bytes<sizeof(T)>;
};
// Behind a pointer a struct may be incomplete, and a void may stand for anything.
template <class T> struct Canonical<T*, std::enable_if_t<std::is_class_v<T> || std::is_union_v<T>>> {
  using type = Pointer<SomeStruct>;
};
template <class T> struct Canonical<T*, std::enable_if_t<std::is_function_v<T>>> { using type = Pointer<SomeFunction>; };
template <class T>
struct Canonical<T*, std::enable_if_t<!std::is_class_v<T> && !std::is_union_v<T> && !std::is_function_v<T>>> {
  using type = Pointer<Canon<T>>;
};
template <class R, class... A> struct Canonical<R(A...)> { using type = Signature<Canon<R>, Canon<A>...>; };

inline int differences = 0;

inline void compare(const char* what, long double real, long double ours) {
  if (real == ours) return;
  ++differences;
  std::printf("differs %s: real %.0Lf, ours %.0Lf\n", what, real, ours);
}

template <class Real, class Ours> void compare_type(const char* what) {
  if (std::is_same_v<Canon<Real>, Canon<Ours>>) return;
  ++differences;
  std::printf("differs %s: the type\n", what);
}
