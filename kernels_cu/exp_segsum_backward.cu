// exp_segsum_backward: grad_input[k] = sum over i >= k and j < k of m[i, j], for matrices of T x T,
// m = grad_output * y; nothing on or above the diagonal of either input is used.
//
// exp_segsum_backward_rows: a strip is W = blockDim.x * N columns of one matrix. Its threads walk
// up from the last row with the sum of each of their columns in a register: at row k that is the
// reverse cumulation c[k, j] = sum over i >= k of m[i, j], and the strip's part of grad_input[k] is
// the sum of its c[k, j] over j < k. Rows at or above the strip's first column have no part.
// Grid    one axis over tiles; a block takes every gridDim.x-th tile.
// Block   (x, y, z), at most 256 threads: x lanes of a strip (a power of two, at most a
//         warp), y strips, z matrices. N elements are 16 bytes. UNROLL rows of both inputs are
//         loaded before the first is used.
// Shared  the strips' parts, T values in the compute type for each strip of the block, when all
//         strips of a matrix are in one block; else the parts go to the workspace and
//         exp_segsum_backward_combine adds them in a second launch.
// Bytes   read 2 sizeof(X) per element below the diagonal, in whole groups of 16 bytes.
// Order   a function of T and the dtype alone: columns run upward in increasing distance from the
//         last row; a row's part is the sum over the N columns of a thread in increasing j, then
//         over the lanes in a butterfly, then over the strips in increasing j.
//         m[i, j] enters exactly the sums of grad_input[k] with j < k <= i, by selection.
// Layout  four leading axes (more are launched one by one), every axis with a 64-bit stride in
//         elements. The vector form needs T a multiple of N and rows of both inputs whose addresses
//         are multiples of 16. Both forms give the same columns to the same threads.

template <class C> __device__ __forceinline__ C sum_over_lanes(C value, int lanes) {
    for (int distance = lanes >> 1; distance > 0; distance >>= 1)
        value = add(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// The sum of the strips' parts of grad_input[k]; strip s has a part if its columns start before k.
template <class C>
__device__ __forceinline__ C sum_of_strips(const C* parts, int64 T, int64 width, int64 k) {
    C total = 0;
    for (int64 s = 0; s * width < k; ++s) total = s == 0 ? parts[k] : add(total, parts[s * T + k]);
    return total;
}

template <class X, bool VECTOR>
__global__ void __launch_bounds__(256, 1) exp_segsum_backward_rows(
    const X* y, int64 y_0, int64 y_1, int64 y_2, int64 y_3, int64 y_i, int64 y_j,
    const X* grad_output, int64 g_0, int64 g_1, int64 g_2, int64 g_3, int64 g_i, int64 g_j,
    X* out, int64 out_0, int64 out_1, int64 out_2, int64 out_3, int64 out_t,
    typename Compute<X>::type* parts_out,
    int64 size_1, int64 size_2, int64 size_3,
    int64 matrices, int64 T, int64 strips, int64 tiles) {
    typedef typename Compute<X>::type C;
    const int N = Width<X>::value, UNROLL = Unroll<X, VECTOR>::value;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int64 width = blockDim.x * N;

    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        // With parts_out, z is 1 and the strips of all matrices are dealt out to blocks in order.
        const int64 work = tile * blockDim.y + threadIdx.y;
        const int64 strip = parts_out ? work % strips : threadIdx.y;
        const int64 n = parts_out ? work / strips : tile * blockDim.z + threadIdx.z;
        const bool active = n < matrices;
        const Leading matrix(n, size_1, size_2, size_3);
        C* parts = parts_out
            ? parts_out + n * strips * T
            : reinterpret_cast<C*>(shared_bytes) + (int64)threadIdx.z * strips * T;
        const int64 start = strip * width, j0 = start + threadIdx.x * N;
        const X* y_column = y + matrix.offset(y_0, y_1, y_2, y_3) + j0 * y_j;
        const X* g_column = grad_output + matrix.offset(g_0, g_1, g_2, g_3) + j0 * g_j;

        C columns[N];
#pragma unroll
        for (int i = 0; i < N; ++i) columns[i] = 0;
        for (int64 bottom = T - 1; bottom > start; bottom -= UNROLL) {
            C ys[UNROLL][N], gs[UNROLL][N];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64 k = bottom - u;
                if (active && j0 < k) {
                    const int count = k - j0 < N ? (int)(k - j0) : N;
                    load<VECTOR>(y_column + k * y_i, y_j, count, ys[u]);
                    load<VECTOR>(g_column + k * g_i, g_j, count, gs[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64 k = bottom - u;
                C sum = 0;
#pragma unroll
                for (int i = 0; i < N; ++i)
                    if (active && j0 + i < k) {
                        columns[i] = add(columns[i], mul(gs[u][i], ys[u][i]));
                        sum = add(sum, columns[i]);
                    }
                sum = sum_over_lanes(sum, blockDim.x);
                if (active && threadIdx.x == 0 && k > start) parts[strip * T + k] = sum;
            }
        }

        if (parts_out) continue;
        __syncthreads();
        X* to = out + matrix.offset(out_0, out_1, out_2, out_3);
        for (int64 k = threadIdx.y * blockDim.x + threadIdx.x; active && k < T;
             k += blockDim.x * blockDim.y)
            round_to(sum_of_strips(parts, T, width, k), to[k * out_t]);
        __syncthreads();  // before the next tile writes into shared memory
    }
}

template <class X>
__global__ void __launch_bounds__(256) exp_segsum_backward_combine(
    const typename Compute<X>::type* parts,
    X* out, int64 out_0, int64 out_1, int64 out_2, int64 out_3, int64 out_t,
    int64 size_1, int64 size_2, int64 size_3,
    int64 matrices, int64 T, int64 strips, int64 width) {
    for (int64 item = (int64)blockIdx.x * blockDim.x + threadIdx.x; item < matrices * T;
         item += (int64)gridDim.x * blockDim.x) {
        const int64 n = item / T, k = item % T;
        const Leading matrix(n, size_1, size_2, size_3);
        X* to = out + matrix.offset(out_0, out_1, out_2, out_3);
        round_to(sum_of_strips(parts + n * strips * T, T, width, k), to[k * out_t]);
    }
}
