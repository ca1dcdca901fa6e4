// modulate: y = x * factor + shift, factor = scale or 1 + scale, for x of shape (B, L, D).
//
// Grid    one axis over tiles of blockDim.z pieces x blockDim.x * N columns, a piece being `rows` rows
//         of one sample; a block takes every gridDim.x-th tile, so that any number of tiles fits.
// Block   (x, y, z): x groups of N columns, y rows at a time, z pieces; at most 256 threads. N
//         elements are 16 bytes of x. UNROLL rows are loaded before the first is used.
// Shared  none. Workspace none.
// Bytes   read sizeof(X), written sizeof(X) per element, and each row of scale and shift once per
//         tile (once per element where there is a row for each token).
// Order   no sums: factor, product and sum are each rounded once, in the compute type.
// Layout  every axis of every array has a 64-bit stride in elements; 0 broadcasts a parameter.
//         The vector form needs inner strides of 1, D a multiple of N, and rows whose addresses
//         are multiples of 16 (of N elements for narrower parameters).

enum { HAS_SCALE = 1, ONE_PLUS_SCALE = 2, HAS_SHIFT = 4 };

template <class X, class P, bool VECTOR>
__global__ void __launch_bounds__(256) modulate(
    const X* x, int64 x_b, int64 x_l, int64 x_d,
    const P* scale, int64 scale_b, int64 scale_l, int64 scale_d,
    const P* shift, int64 shift_b, int64 shift_l, int64 shift_d,
    X* out, int64 out_b, int64 out_l, int64 out_d,
    int64 B, int64 L, int64 D, int64 rows, int64 row_tiles, int64 column_tiles, int64 tiles,
    int flags) {
    typedef typename Compute<X, P>::type C;
    const int N = Width<X>::value, UNROLL = Unroll<X, VECTOR>::value;

    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Columns<VECTOR, N> c(tile % column_tiles, D);
        const int64 piece = tile / column_tiles * blockDim.z + threadIdx.z;
        const int64 b = piece / row_tiles, row_tile = piece % row_tiles;
        if (b >= B || c.count == 0) continue;
        const int64 end = min(L, (row_tile + 1) * rows);

        const X* from = x + b * x_b + c.first * x_d;
        const P* scale_row = scale + b * scale_b + c.first * scale_d;
        const P* shift_row = shift + b * shift_b + c.first * shift_d;
        X* to = out + b * out_b + c.first * out_d;
        C factor[N], addend[N];
        bool load_rows = true;  // of the parameters: once, or for every row if they differ

        for (int64 first = row_tile * rows + threadIdx.y; first < end; first += UNROLL * blockDim.y) {
            C values[UNROLL][N];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64 l = first + u * blockDim.y;
                if (l < end) load<VECTOR>(from + l * x_l, c.step * x_d, c.count, values[u]);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64 l = first + u * blockDim.y;
                if (l >= end) continue;
                if (flags & HAS_SCALE) {
                    if (load_rows || scale_l != 0) {
                        load<VECTOR>(scale_row + l * scale_l, c.step * scale_d, c.count, factor);
#pragma unroll
                        for (int i = 0; i < N; ++i)
                            if (flags & ONE_PLUS_SCALE) factor[i] = add(C(1), factor[i]);
                    }
#pragma unroll
                    for (int i = 0; i < N; ++i) values[u][i] = mul(values[u][i], factor[i]);
                }
                if (flags & HAS_SHIFT) {
                    if (load_rows || shift_l != 0)
                        load<VECTOR>(shift_row + l * shift_l, c.step * shift_d, c.count, addend);
#pragma unroll
                    for (int i = 0; i < N; ++i) values[u][i] = add(values[u][i], addend[i]);
                }
                load_rows = false;
                store<VECTOR>(to + l * out_l, c.step * out_d, c.count, values[u]);
            }
        }
    }
}
