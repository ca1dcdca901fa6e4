// exp_segsum: out[i, j] = exp(x[j+1] + ... + x[i]) for j < i, 1 for j == i, 0 for j > i, for
// matrices of T x T.
//
// Grid    one axis over tiles of blockDim.y items; an item is `rows` rows x blockDim.x * N columns of
//         one matrix. A block takes every gridDim.x-th tile, so that any number of tiles fits.
// Block   (x, y): x groups of N columns, y items; at most 256 threads. N elements are 16 bytes of out.
// Shared  none. Workspace none.
// Bytes   written sizeof(X) per element of out; an item reads x from its first column to its last
//         row: for rows = T / 32 and more, a few hundredths of that at the most.
// Order   a thread owns columns and walks down the rows: each sum runs from j + 1 upward to i, one
//         rounded addition in the compute type per row. An item that starts at row i0 > 0 first
//         repeats the additions of the rows above, so the cut into items changes no bit.
//         Never a difference of prefix sums; x[k] is used for j < k <= i only.
// exp     own, in float and in double, tested to 2 ulp; about 1 was seen. The library's would flush
//         subnormal results under -ftz=true.
// Layout  four leading axes (more are launched one by one), every axis with a 64-bit stride in
//         elements. The vector form needs T a multiple of N and rows of out whose addresses are
//         multiples of 16.

// exp(x) = 2^n exp(r), n = x / ln 2 rounded to an integer, |r| <= ln(2) / 2, with ln 2 in two
// pieces of which n times the first is exact (Cody and Waite); exp(r) by its Taylor polynomial,
// truncated below a quarter of an ulp. 2^n is applied in two steps, the first of them exactly, so
// that a subnormal result is rounded once and kept. Fused multiply-add is meant here: it is part of
// the accuracy.

__device__ __forceinline__ float fused(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
__device__ __forceinline__ double fused(double a, double b, double c) {
    double r;
    asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(r) : "d"(a), "d"(b), "d"(c));
    return r;
}
// Beyond these bounds the result is 0 or infinity. What becomes of a NaN does not matter, see below.
__device__ __forceinline__ float clamp(float x) {
    float r;
    asm("max.f32 %0, %1, 0fC2D00000;\n\tmin.f32 %0, %0, 0f42B40000;" : "=f"(r) : "f"(x));  // -104, 90
    return r;
}
__device__ __forceinline__ double clamp(double x) { return x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x; }
__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) << 1) > 0xff000000u; }
__device__ __forceinline__ bool is_nan(double x) { return x != x; }

template <class C, int TERMS>
__device__ __forceinline__ C polynomial(C r, const C (&inverse_factorials)[TERMS]) {
    C p = inverse_factorials[0];
#pragma unroll
    for (int i = 1; i < TERMS; ++i) p = fused(p, r, inverse_factorials[i]);
    return add(C(1), fused(mul(p, r), r, r));  // 1 + (r + r^2 p): the largest terms come last
}

__device__ __forceinline__ float exponential(float x) {
    const float terms[] = {1.98412698e-4f, 1.38888889e-3f, 8.33333333e-3f,
                           4.16666667e-2f, 1.66666667e-1f, 0.5f};  // 1/7! ... 1/2!
    const float integer = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const float c = clamp(x), shifted = fused(c, 1.44269504f, integer), n = add(shifted, -integer);
    const float p = polynomial(fused(n, -1.42860677e-6f, fused(n, -0.693145752f, c)), terms);
    // n lies in the last bits of shifted. The exponent field takes n + 64 or n - 64, the rest is a
    // product.
    const bool negative = (int)__float_as_uint(c) < 0;
    const uint32 rest = negative ? 64u << 23 : 0u - (64u << 23);
    const float power = negative ? 5.421010862e-20f : 1.844674407e19f;  // 2^-64, 2^64
    const uint32 scaled = __float_as_uint(p) + (__float_as_uint(shifted) << 23) + rest;
    const float y = mul(__uint_as_float(scaled), power);
    return is_nan(x) ? x : y;
}

__device__ __forceinline__ double exponential(double x) {
    const double terms[] = {1.6059043836821613e-10, 2.0876756987868098e-09, 2.505210838544172e-08,
                            2.7557319223985893e-07, 2.7557319223985893e-06, 2.48015873015873e-05,
                            1.984126984126984e-04,  1.3888888888888889e-03, 8.333333333333333e-03,
                            4.1666666666666664e-02, 1.6666666666666666e-01, 0.5};  // 1/13! ... 1/2!
    const double integer = 6755399441055744.0;  // 1.5 * 2^52
    const double c = clamp(x), shifted = fused(c, 1.4426950408889634, integer);
    const double n = add(shifted, -integer);
    const double p = polynomial(
        fused(n, -1.9082149292705877e-10, fused(n, -0.6931471803691238, c)), terms);
    const int exponent = (int)(uint32)__double_as_longlong(shifted), half = exponent >> 1;
    const double y = mul(mul(p, __longlong_as_double((int64)(half + 1023) << 52)),
                         __longlong_as_double((int64)(exponent - half + 1023) << 52));
    return is_nan(x) ? x : y;
}

// Rows of an item from one of its batches of x, of which each lane holds one.
template <class X, bool VECTOR> struct Walk {
    typedef typename Compute<X>::type C;
    static const int N = Width<X>::value;
    uint32 mask;
    int lanes, count;
    int64 out_i, out_j;

    // LEFT: all columns are left of the diagonal in all rows. STORE: else sums are only added up.
    template <bool LEFT, bool STORE>
    __device__ __forceinline__ void down(C mine, int rows, int diagonal, X* row, C (&sums)[N]) const {
        const int step = VECTOR ? 1 : lanes;
#pragma unroll 1
        for (int k = 0; k < rows; ++k, row += out_i) {
            const C x = __shfl_sync(mask, mine, k, lanes);
            C values[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int distance = diagonal + k - n * step;
                if (STORE) values[n] = !LEFT && distance == 0;
                if (LEFT || distance > 0) {
                    sums[n] = add(sums[n], x);
                    if (STORE) values[n] = exponential(sums[n]);
                }
            }
            if (STORE && count > 0) store<VECTOR>(row, step * out_j, count, values);
        }
    }
};

template <class X, bool VECTOR>
__global__ void __launch_bounds__(256) exp_segsum(
    const X* x, int64 x_0, int64 x_1, int64 x_2, int64 x_3, int64 x_t,
    X* out, int64 out_0, int64 out_1, int64 out_2, int64 out_3, int64 out_i, int64 out_j,
    int64 size_1, int64 size_2, int64 size_3,
    int64 T, int64 rows, int64 row_tiles, int64 column_tiles, int64 items) {
    typedef typename Compute<X>::type C;
    const int N = Width<X>::value, WARP = 32, lanes = blockDim.x;
    // The lanes of an item, which share what they load of x; a warp may hold several items.
    const int warp_lane = (threadIdx.y * lanes + threadIdx.x) & 31;
    const uint32 mask = (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) << (warp_lane & -lanes);

    for (int64 item = (int64)blockIdx.x * blockDim.y + threadIdx.y; item < items;
         item += (int64)gridDim.x * blockDim.y) {
        const int64 column_tile = item % column_tiles;
        const int64 row_tile = item / column_tiles % row_tiles;
        const Leading matrix(item / column_tiles / row_tiles, size_1, size_2, size_3);
        const X* from = x + matrix.offset(x_0, x_1, x_2, x_3);
        const Columns<VECTOR, N> c(column_tile, T);
        X* to = out + matrix.offset(out_0, out_1, out_2, out_3) + c.first * out_j;

        const Walk<X, VECTOR> walk = {mask, lanes, c.count, out_i, out_j};
        C sums[N];
#pragma unroll
        for (int n = 0; n < N; ++n) sums[n] = 0;
        const int64 start = row_tile * rows, end = min(T, start + rows);
        // Each lane loads one x of a batch, and all get them in turn. Rows above the item's, from
        // its first column on, are only added; batches end where the item's own rows start.
        const int64 first_column = column_tile * lanes * N;
        for (int64 base = first_column < start ? first_column : start; base < end;) {
            const int64 limit = base < start ? start : end;
            const int batch = limit - base < lanes ? (int)(limit - base) : lanes;
            const C mine = threadIdx.x < batch
                ? Load<C, X>::from(from[(base + threadIdx.x) * x_t]) : C(0);
            // Columns from the thread's first to the diagonal in row base, cut off where all or
            // none of its columns are left of it: as an int, comparisons are short.
            const int diagonal = (int)max(min(base - c.first, int64(N * WARP)), int64(-WARP));
            const bool left = base >= first_column + lanes * N;  // of the diagonal: all columns
            X* const row = to + base * out_i;
            if (base < start) {
                if (left)
                    walk.template down<true, false>(mine, batch, diagonal, row, sums);
                else
                    walk.template down<false, false>(mine, batch, diagonal, row, sums);
            } else if (left) {
                walk.template down<true, true>(mine, batch, diagonal, row, sums);
            } else {
                walk.template down<false, true>(mine, batch, diagonal, row, sums);
            }
            base += batch;
        }
    }
}
