// Kernels with planted faults, and their sound twins, for the tests of the checkers.

typedef long long i64;
extern "C" {
__global__ void copy(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
__global__ void copy_off_by_one(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = x[i];
}
__global__ void copy_skips_last(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n - 1) y[i] = x[i];
}
__global__ void copy_vector(const float4* x, float4* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
__global__ void copy_rows(const float* x, float* y, i64 sx, i64 sy, int columns) {
  if (threadIdx.x < columns)
    y[blockIdx.x * sy + threadIdx.x] = x[blockIdx.x * sx + threadIdx.x];
}
__global__ void select_below(const float4* x, float* y, int limit) {
  float4 v = x[threadIdx.x];
  int i = 4 * threadIdx.x;
  y[i] = i < limit ? v.x : 0.0f;
  y[i + 1] = i + 1 < limit ? v.y : 0.0f;
  y[i + 2] = i + 2 < limit ? v.z : 0.0f;
  y[i + 3] = i + 3 < limit ? v.w : 0.0f;
}
__global__ void multiply_below(const float4* x, float* y, int limit) {
  float4 v = x[threadIdx.x];
  int i = 4 * threadIdx.x;
  y[i] = v.x * (i < limit ? 1.0f : 0.0f);
  y[i + 1] = v.y * (i + 1 < limit ? 1.0f : 0.0f);
  y[i + 2] = v.z * (i + 2 < limit ? 1.0f : 0.0f);
  y[i + 3] = v.w * (i + 3 < limit ? 1.0f : 0.0f);
}
__global__ void branch_on_value(const int* x, int* y) {
  if (x[threadIdx.x] > 0) y[threadIdx.x] = 1; else y[threadIdx.x + 32] = 2;
}
__global__ void gather(const int* index, const float* x, float* y) {
  y[threadIdx.x] = x[index[threadIdx.x]];
}
__global__ void reverse(const float* x, float* y, int barrier) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];
}
__global__ void reverse_in_warp(const float* x, float* y, int mode) {
  __shared__ volatile float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (mode == 1) __syncwarp();
  if (mode == 2) __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
  y[threadIdx.x] = tile[threadIdx.x ^ 31];
}
__global__ void reverse_over_warps(const float* x, float* y) {
  __shared__ volatile float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  y[threadIdx.x] = tile[threadIdx.x ^ 63];
}
__global__ void half_warp_sync(const float* x, float* y) {
  __shared__ volatile float tile[16];
  if (threadIdx.x < 16) {
    tile[threadIdx.x] = x[threadIdx.x];
    __syncwarp(0x0000ffffu);
  } else {
    y[threadIdx.x] = tile[threadIdx.x - 16];
  }
}
__global__ void readers_then_writer(const float* x, float* y, int readers) {
  __shared__ volatile float cell;
  if (threadIdx.x == 0) cell = x[0];
  __syncthreads();
  float v = 0.0f;
  if (threadIdx.x >= 31 - readers && threadIdx.x < 31) v = cell;
  if (threadIdx.x == 30) cell = 1.0f;
  y[threadIdx.x] = v;
}
__global__ void wide_columns(float* y, int bytes, int step) {
  extern __shared__ __align__(16) volatile unsigned char raw[];
  if (bytes == 8) *(volatile double*)(raw + 8 * threadIdx.x * step) = 1.0;
  if (bytes == 16) {
    unsigned to = __cvta_generic_to_shared((void*)(raw + 16 * threadIdx.x * step));
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(1));
  }
  y[threadIdx.x] = 0.0f;
}
__global__ void double_buffer(const float* x, float* y, int barrier) {
  __shared__ float tile[32];
  for (int k = 0; k < 2; ++k) {
    tile[threadIdx.x] = x[32 * k + threadIdx.x];
    __syncthreads();
    y[32 * k + threadIdx.x] = tile[31 - threadIdx.x];
    if (barrier) __syncthreads();
  }
}
__global__ void all_write_one(float* y) { y[0] = 1.0f; }
__global__ void block_sum(float* y) { if (threadIdx.x == 0) y[0] += 1.0f; }
__global__ void read_neighbour(float* y) {
  if (threadIdx.x == 0) y[blockIdx.x] = 1.0f + y[(blockIdx.x + 1) % gridDim.x];
}
__global__ void one_reads_one_writes(const float* x, float* y, float* z) {
  if (blockIdx.x == 0) z[0] = x[0]; else y[0] = 2.0f;
}
__global__ void uninitialised_tile(float* y) {
  __shared__ float tile[64];
  if (threadIdx.x != 5) tile[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x];
}
__global__ void partial_barrier(float* y, int n) {
  if (threadIdx.x < n) { asm volatile("bar.sync 0;"); asm volatile("bar.warp.sync 0xffffffff;"); }
  else asm volatile("bar.warp.sync 0xffffffff;");
  y[threadIdx.x] = 1.0f;
}
__global__ void barrier_in_both_arms(float* y) {
  if (threadIdx.x < 32) { y[threadIdx.x] = 1.0f; __syncthreads(); y[threadIdx.x] = 5.0f; }
  else { y[threadIdx.x] = 2.0f; __syncthreads(); y[threadIdx.x] = 3.0f; }
}
__global__ void early_exit(float* y, int n) {
  if (threadIdx.x >= n) return;
  y[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = 2.0f;
}
__global__ void partial_shuffle(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);
  y[threadIdx.x] = v;
}
__global__ void partial_shuffle_then_barrier(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 40) v = __shfl_down_sync(0xffffffffu, v, 1);
  __syncthreads();
  y[threadIdx.x] = v;
}
__global__ void foreign_mask(float* y) {
  y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, (float)threadIdx.x, 1);
}
__global__ void reads_outside_mask(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, (float)threadIdx.x, 16);
}
__global__ void shared_overrun(float* y, int n) {
  extern __shared__ float dynamic[];
  dynamic[threadIdx.x + n] = 1.0f;
  y[threadIdx.x] = dynamic[threadIdx.x + n];
}
__global__ void scalars(float* y, double a, float b, i64 c, int d, unsigned char e) {
  y[0] = (float)a + b + c + d + e;
}
struct Pair { i64 n; float v; };
__global__ void structs(Pair p, float* y) { y[p.n] = p.v; }
__global__ void __launch_bounds__(64) bounded(float* y) { y[threadIdx.x] = 1.0f; }
__global__ void divide(int* y, int a, int b) { y[0] = a / b; }
__global__ void stride(const float* x, float* y, int step) { y[threadIdx.x] = x[threadIdx.x * step]; }
__global__ void columns(float* y, int step) {
  __shared__ volatile float tile[1024];
  tile[threadIdx.x * step] = 1.0f;
  y[threadIdx.x] = 0.0f;
}
}
