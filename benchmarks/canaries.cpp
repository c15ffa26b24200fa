// An allocator for PyTorch that finds stores outside of a tensor. Each tensor has its own
// allocation between two canaries. canary_free checks them, and canaries_damaged returns how many
// allocations had a damaged canary since its last call.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kCanary = 1024;
constexpr int kByte = 0xA5;
int damaged = 0;

void require(cudaError_t status) {
  if (status != cudaSuccess) std::abort();
}

bool is_whole(const char* g_canary, cudaStream_t stream) {
  std::vector<unsigned char> found(kCanary), expected(kCanary, kByte);
  require(cudaMemcpyAsync(found.data(), g_canary, kCanary, cudaMemcpyDeviceToHost, stream));
  require(cudaStreamSynchronize(stream));
  return found == expected;
}

}  // namespace

extern "C" {

void* canary_alloc(ptrdiff_t size, int device, cudaStream_t stream) {
  void* memory = nullptr;
  require(cudaSetDevice(device));
  require(cudaMalloc(&memory, size + 2 * kCanary));
  char* const g_tensor = static_cast<char*>(memory) + kCanary;
  require(cudaMemsetAsync(memory, kByte, kCanary, stream));
  require(cudaMemsetAsync(g_tensor + size, kByte, kCanary, stream));
  return g_tensor;
}

void canary_free(void* tensor, ptrdiff_t size, int device, cudaStream_t stream) {
  if (tensor == nullptr) return;
  require(cudaSetDevice(device));
  char* const g_tensor = static_cast<char*>(tensor);
  if (!is_whole(g_tensor - kCanary, stream) || !is_whole(g_tensor + size, stream)) ++damaged;
  require(cudaFree(g_tensor - kCanary));
}

int canaries_damaged() {
  const int count = damaged;
  damaged = 0;
  return count;
}

}  // extern "C"
