"""The loaded NCCL library and CUDA driver: functions, devices, streams, waits."""
