// modulate_backward, for x and grad_output of shape (B, L, D):
//   grad_input = grad_output * factor, factor = scale or 1 + scale
//   grad_scale = sum of grad_output * x,   grad_shift = sum of grad_output
// over the axes along which the parameter was broadcast.
//
// modulate_backward_rows: one pass over x and grad_output gives all three.
// Grid    one axis over tiles of blockDim.z chunks x blockDim.x * N columns, a chunk being CHUNK_ROWS
//         rows of one sample; a block takes every gridDim.x-th tile, so that any number fits.
// Block   (x, y, z): x groups of N columns, y = LANES = 8 rows at a time (fewer if there are fewer
//         rows), z chunks; at most 256 threads. N elements are 16 bytes of x. UNROLL rows of both
//         inputs are loaded before the first is used.
// Shared  256 * N accumulators in the compute type, for each of the two sums, and the factors of the
//         block's columns, loaded by its first row for all.
// Bytes   read 2 sizeof(X), written sizeof(X) per element, each row of scale once per tile, and a
//         chunk sum in the compute type per column and chunk where there is more than one chunk.
// Order   (numerical contract) row l of a chunk goes to accumulator l mod LANES, each runs in
//         increasing l, and they are added in order 0 .. LANES - 1: a function of the number of
//         rows alone. Chunk sums are added by modulate_backward_combine.
// Layout  every axis of every array has a 64-bit stride in elements; 0 broadcasts scale. "Sample"
//         and "row" are B and L, or L and B for parameters of shape (1, L, D), whose gradients are
//         sums over B. The vector form needs what modulate.cu says.
//
// modulate_backward_combine: adds the chunk sums of a sample in increasing order in double, and for
// a parameter shared by the batch the samples' totals in increasing order in double; the total is
// rounded to the compute type and then stored.
// Grid    x over groups of blockDim.x columns of the gradient, y picks the gradient; a block takes
//         every gridDim.x-th group.
// Block   (x, y): x columns, y rows of chunk sums at a time, PREFETCH of them for each thread. All
//         threads load, into shared memory; the first row of threads adds, while the next chunk
//         sums are on their way.
// Shared  256 * PREFETCH values in the compute type.
// Bytes   reads each chunk sum once.

enum { HAS_SCALE = 1, ONE_PLUS_SCALE = 2, WRITE_GRAD_INPUT = 4 };
enum Sum { NO_SUM = 0, PER_TOKEN = 1, CHUNK_SUMS = 2, FINAL = 3 };
const int CHUNK_ROWS = 64;

template <class X, class P, bool VECTOR>
__global__ void __launch_bounds__(256, 1) modulate_backward_rows(
    const X* x, int64 x_b, int64 x_l, int64 x_d,
    const X* grad_output, int64 grad_output_b, int64 grad_output_l, int64 grad_output_d,
    const P* scale, int64 scale_b, int64 scale_l, int64 scale_d,
    X* grad_input, int64 grad_input_b, int64 grad_input_l, int64 grad_input_d,
    P* grad_scale, int64 grad_scale_b, int64 grad_scale_l, int64 grad_scale_d,
    P* grad_shift, int64 grad_shift_b, int64 grad_shift_l, int64 grad_shift_d,
    typename Compute<X, P>::type* scale_sums, typename Compute<X, P>::type* shift_sums,
    int64 B, int64 L, int64 D, int64 chunks, int64 column_tiles, int64 tiles,
    int flags, int scale_mode, int shift_mode) {
    typedef typename Compute<X, P>::type C;
    const int N = Width<X>::value, UNROLL = Unroll<X, VECTOR>::value;
    // By the element of a group first, then by thread: neighbours touch neighbouring banks, also
    // (thanks to the padding, an N-th of the 128 bytes of all banks) when they later take
    // neighbouring elements.
    __shared__ C shared_sums[2][N][256 + 128 / sizeof(C) / N], shared_factor[N][128];
    const int column = threadIdx.z * blockDim.x + threadIdx.x;  // group of columns, in the block
    const int columns = blockDim.z * blockDim.x;                // from one lane to the next
    const bool has_factor = flags & HAS_SCALE && flags & WRITE_GRAD_INPUT;
    const bool share_factor = has_factor && scale_l == 0 && blockDim.y > 1;

    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Columns<VECTOR, N> c(tile % column_tiles, D);
        const int64 piece = tile / column_tiles * blockDim.z + threadIdx.z;
        const int64 b = piece / chunks, chunk = piece % chunks;
        const bool active = b < B && c.count > 0;
        const int64 end = min(L, (chunk + 1) * CHUNK_ROWS);

        const X* x_row = x + b * x_b + c.first * x_d;
        const X* grad_row = grad_output + b * grad_output_b + c.first * grad_output_d;
        const P* scale_row = scale + b * scale_b + c.first * scale_d;
        C xs[UNROLL][N], grads[UNROLL][N], factor[N];

        auto load_rows = [&](int64 first) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64 l = first + u * blockDim.y;
                if (!active || l >= end) continue;
                load<VECTOR>(grad_row + l * grad_output_l, c.step * grad_output_d, c.count, grads[u]);
                if (scale_mode != NO_SUM)
                    load<VECTOR>(x_row + l * x_l, c.step * x_d, c.count, xs[u]);
            }
        };
        auto load_factor = [&](int64 l) {
            load<VECTOR>(scale_row + l * scale_l, c.step * scale_d, c.count, factor);
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (flags & ONE_PLUS_SCALE) factor[i] = add(C(1), factor[i]);
        };

        int64 first = chunk * CHUNK_ROWS + threadIdx.y;
        load_rows(first);  // before the barrier, so that the loads of all rows overlap
        if (share_factor) {
            if (threadIdx.y == 0 && active) {
                load_factor(0);
#pragma unroll
                for (int i = 0; i < N; ++i) shared_factor[i][column] = factor[i];
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < N; ++i) factor[i] = active ? shared_factor[i][column] : C(0);
        } else if (has_factor && active && scale_l == 0) {
            load_factor(0);
        }

        C scale_sum[N], shift_sum[N];
#pragma unroll
        for (int i = 0; i < N; ++i) scale_sum[i] = shift_sum[i] = C(-0.0);  // the neutral start
        while (active && first < end) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64 l = first + u * blockDim.y;
                if (l >= end) continue;
                if (has_factor && scale_l != 0) load_factor(l);
                if (scale_mode != NO_SUM) {
                    C products[N];
#pragma unroll
                    for (int i = 0; i < N; ++i) products[i] = mul(grads[u][i], xs[u][i]);
                    if (scale_mode == PER_TOKEN)
                        store<VECTOR>(grad_scale + b * grad_scale_b + l * grad_scale_l +
                                          c.first * grad_scale_d,
                                      c.step * grad_scale_d, c.count, products);
#pragma unroll
                    for (int i = 0; i < N; ++i) scale_sum[i] = add(scale_sum[i], products[i]);
                }
                if (shift_mode == PER_TOKEN)
                    store<VECTOR>(grad_shift + b * grad_shift_b + l * grad_shift_l +
                                      c.first * grad_shift_d,
                                  c.step * grad_shift_d, c.count, grads[u]);
#pragma unroll
                for (int i = 0; i < N; ++i) shift_sum[i] = add(shift_sum[i], grads[u][i]);
                if (flags & WRITE_GRAD_INPUT) {
                    if (has_factor)
#pragma unroll
                        for (int i = 0; i < N; ++i) grads[u][i] = mul(grads[u][i], factor[i]);
                    store<VECTOR>(grad_input + b * grad_input_b + l * grad_input_l +
                                      c.first * grad_input_d,
                                  c.step * grad_input_d, c.count, grads[u]);
                }
            }
            first += UNROLL * blockDim.y;
            load_rows(first);
        }

        if (scale_mode < CHUNK_SUMS && shift_mode < CHUNK_SUMS) {
            if (share_factor) __syncthreads();  // before the next tile writes into shared memory
            continue;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            shared_sums[0][i][threadIdx.y * columns + column] = scale_sum[i];
            shared_sums[1][i][threadIdx.y * columns + column] = shift_sum[i];
        }
        __syncthreads();
        // Now a thread adds up the lanes of single columns, so that stores are coalesced.
        const int width = blockDim.x * N, items = blockDim.z * width;
        for (int item = threadIdx.y * columns + column; item < 2 * items;
             item += columns * blockDim.y) {
            const bool of_scale = item < items;
            const int z = item % items / width, w = item % width;
            const int group = VECTOR ? w / N : w % blockDim.x, i = VECTOR ? w % N : w / blockDim.x;
            const int64 summed = piece - threadIdx.z + z, d = tile % column_tiles * width + w;
            const int mode = of_scale ? scale_mode : shift_mode;
            if (mode < CHUNK_SUMS || summed >= B * chunks || d >= D) continue;
            const C* lanes = &shared_sums[of_scale ? 0 : 1][i][z * blockDim.x + group];
            C total = lanes[0];
            for (int lane = 1; lane < blockDim.y; ++lane) total = add(total, lanes[lane * columns]);
            if (mode == CHUNK_SUMS)
                (of_scale ? scale_sums : shift_sums)[summed * D + d] = total;
            else if (of_scale)  // the only chunk of its sample
                round_to(total, grad_scale[summed * grad_scale_b + d * grad_scale_d]);
            else
                round_to(total, grad_shift[summed * grad_shift_b + d * grad_shift_d]);
        }
        __syncthreads();  // before the next tile writes into shared memory
    }
}

template <class C, class P>
__global__ void __launch_bounds__(256) modulate_backward_combine(
    const C* sums_0, P* grad_0, int64 grad_0_b, int64 grad_0_d, int shared_0,
    const C* sums_1, P* grad_1, int64 grad_1_b, int64 grad_1_d, int shared_1,
    int64 samples, int64 chunks, int64 D) {
    const C* sums = blockIdx.y == 0 ? sums_0 : sums_1;
    P* grad = blockIdx.y == 0 ? grad_0 : grad_1;
    const int64 grad_b = blockIdx.y == 0 ? grad_0_b : grad_1_b;
    const int64 grad_d = blockIdx.y == 0 ? grad_0_d : grad_1_d;
    const bool shared = blockIdx.y == 0 ? shared_0 : shared_1;
    const int64 rows = shared ? 1 : samples, length = shared ? samples * chunks : chunks;
    const int64 groups = (D + blockDim.x - 1) / blockDim.x;
    const int PREFETCH = 8, at_once = PREFETCH * blockDim.y;
    __shared__ C staged[256 * PREFETCH];

    for (int64 item = blockIdx.x; item < rows * groups; item += gridDim.x) {
        const int64 row = item / groups, d = item % groups * blockDim.x + threadIdx.x;
        // The sums of all chunks of all samples follow one another.
        const C* column = sums + row * chunks * D + d;
        C values[PREFETCH];
        auto load_from = [&](int64 first) {
#pragma unroll
            for (int u = 0; u < PREFETCH; ++u) {
                const int64 next = first + u * blockDim.y + threadIdx.y;
                values[u] = d < D && next < length ? column[next * D] : C(0);
            }
        };

        double total = length > 0 ? -0.0 : 0.0;  // a sum over nothing is +0
        double sample = -0.0;
        int64 chunk = 0;
        load_from(0);
        for (int64 first = 0; first < length; first += at_once) {
#pragma unroll
            for (int u = 0; u < PREFETCH; ++u)
                staged[(u * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x] = values[u];
            __syncthreads();
            load_from(first + at_once);
            const int count = threadIdx.y == 0 ? (int)min(length - first, (int64)at_once) : 0;
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                sample = add(sample, widen(staged[i * blockDim.x + threadIdx.x]));
                if (++chunk == chunks) {
                    total = add(total, sample);
                    sample = -0.0;
                    chunk = 0;
                }
            }
            __syncthreads();  // before the next values are staged
        }
        if (threadIdx.y != 0 || d >= D) continue;
        C rounded;
        round_to(total, rounded);
        round_to(rounded, grad[row * grad_b + d * grad_d]);
    }
}
