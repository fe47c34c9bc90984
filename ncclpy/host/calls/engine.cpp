// The symbol by which a loader recognises this library as the host engine.
extern "C" {
__attribute__((visibility("default"))) extern const char ncclpyHostEngine[];
const char ncclpyHostEngine[] = "ncclpy host engine: NCCL's ABI over CPU memory";
}
