// exp_segsum_backward: grad_input[k] = sum over i >= k and j < k of m[i, j], for matrices of T x T,
// m = grad_output * y; nothing on or above the diagonal of either input is used.
//
// exp_segsum_backward_rows: a strip is W = blockDim.x * N columns of one matrix. A walker, that is
// blockDim.x lanes, takes some rows of a strip and walks up from the last of them with the sum of
// each column in a register; the sum of those with j < k is what these rows give to grad_input[k].
// Walkers of a block stand one below the other; each then adds to its own rows k the column sums,
// j < k, of those below, which it finds in shared memory.
//   Up to 320 rows: a block takes whole matrices, all rows of all their strips.
//   More rows: a block takes a tile, BAND_ROWS rows x one strip, on or below the diagonal. What it
//   gives to its own rows goes to the workspace, as do its column sums and the sum of these, for
//   the bands above; exp_segsum_backward_combine adds them up in a second launch.
// Grid    one axis over groups of matrices, or over tiles; a block takes every gridDim.x-th. The
//         combining kernel: one axis over the bands of all matrices.
// Block   (x, y, z), at most 512 threads: x lanes (a power of two, at most a warp), y walkers of a
//         strip, z strips. N elements are 16 bytes. UNROLL rows of both inputs are loaded before
//         the first is used. The combining kernel: (BAND_ROWS, 2).
// Shared  W values in the compute type for each walker (and 16 bytes of padding after every 128
//         where N is 8), and a value for each row of each strip of the block.
// Bytes   read 2 sizeof(X) per element below the diagonal, in whole groups of 16 bytes. Tiles add
//         1 / W + 1 / BAND_ROWS values of the compute type per element, written and read once.
// Order   a function of T and the dtype alone, which fix strips, bands and the rows of a walker.
//         In a walker, columns run upward from its last row; a row's sum is over the N columns of a
//         thread in increasing j, then over the lanes in a butterfly. From walkers or bands below:
//         per column from the lowest upward, then a prefix sum over j. Strips in increasing j.
//         m[i, j] enters exactly the sums of grad_input[k] with j < k <= i, by selection; nothing
//         is subtracted.
// Layout  four leading axes (more are launched one by one), every axis with a 64-bit stride in
//         elements. The vector form needs T a multiple of N and rows of both inputs whose addresses
//         are multiples of 16. In the scalar form neighbouring lanes load neighbouring columns and
//         trade products through shared memory, so that in both forms a thread owns the same N
//         neighbouring columns: the same bits.

const int BAND_ROWS = 128;
const uint32 ALL_LANES = 0xffffffffu;

// Of several values at once, so that their shuffles overlap.
template <class C, int COUNT>
__device__ __forceinline__ void sum_over_lanes(C (&values)[COUNT], int lanes) {
    for (int distance = lanes >> 1; distance > 0; distance >>= 1)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            values[i] = add(values[i], __shfl_xor_sync(ALL_LANES, values[i], distance));
}
template <class C> __device__ __forceinline__ C sum_over_lanes(C value, int lanes) {
    C values[1] = {value};
    sum_over_lanes(values, lanes);
    return values[0];
}

// The sum over the lanes below this one, of the lanes that work together.
template <class C> __device__ __forceinline__ C sum_over_lower_lanes(C value, int lanes) {
    const int lane = threadIdx.x & (lanes - 1);
    for (int distance = 1; distance < lanes; distance <<= 1) {
        const C lower = __shfl_up_sync(ALL_LANES, value, distance, lanes);
        if (lane >= distance) value = add(value, lower);
    }
    const C lower = __shfl_up_sync(ALL_LANES, value, 1, lanes);
    return lane > 0 ? lower : C(0);
}

// What a thread loads of a row, as stored: N columns, `step` columns apart, of which those before
// `limit` (counted from its first) are used.
template <class X, bool VECTOR> struct Group {
    typedef typename Compute<X>::type C;
    static const int N = Width<X>::value;
    union { uint4 packet; X element[N]; };
    __device__ __forceinline__ void load(const X* address, int64 stride, int step, int limit) {
        if (VECTOR) {
            if (limit > 0) packet = *reinterpret_cast<const uint4*>(address);
        } else {
            packet = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < N; ++i, address += stride)
                if (i * step < limit) element[i] = *address;
        }
    }
    __device__ __forceinline__ C value(int i) const { return Load<C, X>::from(element[i]); }
};

// Values of the walkers' columns in shared memory, N neighbours to a lane, 16 bytes at a time.
// Lanes that own 32 bytes would meet in a bank but for 16 bytes of padding after every 128.
template <class C, int N> struct Slots {
    static const int each = 16 / sizeof(C);
    C* base;
    static __device__ __forceinline__ int place(int slot) {
        return each < N ? slot + (slot >> 5) * each : slot;
    }
    __device__ __forceinline__ void put(int first, const C (&values)[N]) const {
#pragma unroll
        for (int p = 0; p < N / each; ++p) {
            C some[each];
#pragma unroll
            for (int i = 0; i < each; ++i) some[i] = values[p * each + i];
            pack(some, *reinterpret_cast<uint4*>(base + place(first + p * each)));
        }
    }
    __device__ __forceinline__ void get(int first, C (&values)[N]) const {
#pragma unroll
        for (int p = 0; p < N / each; ++p) {
            union { uint4 packet; C some[each]; } u;
            u.packet = *reinterpret_cast<const uint4*>(base + place(first + p * each));
#pragma unroll
            for (int i = 0; i < each; ++i) values[p * each + i] = u.some[i];
        }
    }
    // From every blockDim.x-th column to N neighbours, for the walker whose slots start at first.
    __device__ __forceinline__ void trade(int first, C (&values)[N]) const {
        __syncwarp();  // the row before has been taken
#pragma unroll
        for (int i = 0; i < N; ++i)
            base[place(first + threadIdx.x + i * blockDim.x)] = values[i];
        __syncwarp();
        get(first + threadIdx.x * N, values);
    }
};

// The columns of the walkers below this one, added up from the lowest.
template <class C, int N>
__device__ __forceinline__ void sum_of_lower_walkers(const Slots<C, N>& slots, C (&below)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) below[i] = 0;
    for (int other = blockDim.y - 1; other > threadIdx.y; --other) {
        C columns[N];
        slots.get(((threadIdx.z * blockDim.y + other) * blockDim.x + threadIdx.x) * N, columns);
#pragma unroll
        for (int i = 0; i < N; ++i) below[i] = add(below[i], columns[i]);
    }
}

// Adds to each row k of the walker that is also the number of a column the columns j < k of the
// strip; returns the sum of all columns.
template <class C, int N>
__device__ __forceinline__ C add_prefix_sums(const C (&columns)[N], C* rows, int diagonal, int low,
                                             int high, int lead) {
    const int lanes = blockDim.x;
    C sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum = add(sum, columns[i]);
    sum = sum_over_lower_lanes(sum, lanes);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int row = diagonal + threadIdx.x * N + i;
        if (row >= low && row < high && row + lead > 0) rows[row] = add(rows[row], sum);
        sum = add(sum, columns[i]);
    }
    return __shfl_sync(ALL_LANES, sum, lanes - 1, lanes);
}

// The tile-th of a matrix' tiles on or below the diagonal. A long band and a short one are paired
// to rows of one length, so that no square root is needed.
struct Tile {
    int64 band, strip;
    __device__ __forceinline__ Tile(int64 tile, int64 bands, int strips_of_band) {
        const int64 length = bands | 1, pair = tile / strips_of_band / length;
        int64 column = tile / strips_of_band % length;
        band = bands - 1 - pair;
        if (column > band) {
            column -= band + 1;
            band = pair - (bands & 1);
        }
        strip = column * strips_of_band + tile % strips_of_band;
    }
};

template <class X, bool VECTOR>
__global__ void __launch_bounds__(512, 1) exp_segsum_backward_rows(
    const X* y, int64 y_0, int64 y_1, int64 y_2, int64 y_3, int64 y_i, int64 y_j,
    const X* grad_output, int64 g_0, int64 g_1, int64 g_2, int64 g_3, int64 g_i, int64 g_j,
    X* out, int64 out_0, int64 out_1, int64 out_2, int64 out_3, int64 out_t,
    typename Compute<X>::type* row_sums, typename Compute<X>::type* column_sums,
    typename Compute<X>::type* tile_sums,
    int64 size_1, int64 size_2, int64 size_3,
    int64 matrices, int64 T, int64 strips, int64 bands, int64 tiles, int64 blocks) {
    typedef typename Compute<X>::type C;
    const int N = Width<X>::value, UNROLL = VECTOR ? 4 : sizeof(X) == 2 ? 1 : 2;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const bool tiled = bands > 0;
    const int x = threadIdx.x, lanes = blockDim.x, walkers = blockDim.y, width = lanes * N;
    const int walker = threadIdx.z * walkers + threadIdx.y;
    const int thread = walker * lanes + x, threads = blockDim.z * walkers * lanes;
    const Slots<C, N> slots = {reinterpret_cast<C*>(shared_bytes)};
    // What the strip gives to each of its rows in this block.
    const int row_slots = tiled ? BAND_ROWS : (int)T | 1;  // odd: the strips differ in their banks
    C* const rows = slots.base + slots.place(threads * N) + threadIdx.z * row_slots;

    for (int64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        int64 n, band = 0, strip;
        if (tiled) {
            const Tile tile(block % tiles, bands, BAND_ROWS / width);
            n = block / tiles, band = tile.band, strip = tile.strip;
        } else {
            n = (block * blockDim.z + threadIdx.z) / strips, strip = threadIdx.z % strips;
        }
        const int64 start = strip * width, top = tiled ? band * BAND_ROWS : start;
        const int height = tiled ? (int)min(T - top, (int64)BAND_ROWS) : (int)(T - top);
        const int lead = (int)min(top - start, (int64)width);  // columns to the left of row 0
        const bool active = n < matrices;
        const Leading matrix(n, size_1, size_2, size_3);

        // Rows are counted from top. All walkers of a warp have equally many steps, since they
        // shuffle together.
        const int each = (height + walkers - 1) / walkers;
        const int low = threadIdx.y * each, high = active ? min(height, low + each) : 0;
        const int step = VECTOR ? 1 : lanes, first = VECTOR ? x * N : x;
        const X* y_row = y + matrix.offset(y_0, y_1, y_2, y_3) + (start + first) * y_j +
                         (top + low + each - 1) * y_i;
        const X* g_row = grad_output + matrix.offset(g_0, g_1, g_2, g_3) + (start + first) * g_j +
                         (top + low + each - 1) * g_i;

        C columns[N];
#pragma unroll
        for (int i = 0; i < N; ++i) columns[i] = 0;
        for (int last = low + each - 1; last >= low; last -= UNROLL) {
            Group<X, VECTOR> ys[UNROLL], gs[UNROLL];
            int limits[UNROLL];  // columns of the strip to the left of the diagonal
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int row = last - u;
                limits[u] = row >= low && row < high ? min(row + lead, width) : 0;
                ys[u].load(y_row, step * y_j, step, limits[u] - first);
                gs[u].load(g_row, step * g_j, step, limits[u] - first);
                y_row -= y_i, g_row -= g_i;
            }
            C sums[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                C products[N];
                sums[u] = 0;
#pragma unroll
                for (int i = 0; i < N; ++i) products[i] = mul(gs[u].value(i), ys[u].value(i));
                if (!VECTOR) slots.trade(walker * width, products);
#pragma unroll
                for (int i = 0; i < N; ++i)
                    if (x * N + i < limits[u]) {
                        columns[i] = add(columns[i], products[i]);
                        sums[u] = add(sums[u], columns[i]);
                    }
            }
            sum_over_lanes(sums, lanes);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (x == 0 && limits[u] > 0) rows[last - u] = sums[u];
        }

        const bool for_bands_above = tiled && start + width <= top;
        if (walkers > 1) {
            if (!VECTOR) __syncwarp();
            slots.put(thread * N, columns);
            __syncthreads();
            C below[N], sum = 0;
            sum_of_lower_walkers(slots, below);
            const int diagonal = (int)(start - top);  // the row whose k is the strip's first column
            const C all = add_prefix_sums(below, rows, diagonal, low, high, lead);
            for (int row = max(low, diagonal + width) + x; row < high; row += lanes)
                rows[row] = add(rows[row], all);

            if (for_bands_above) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    columns[i] = add(below[i], columns[i]);
                    sum = add(sum, columns[i]);
                }
                sum = sum_over_lanes(sum, lanes);
                if (threadIdx.y == 0) slots.put(thread * N, columns);
                if (thread == 0) tile_sums[(n * bands + band) * strips + strip] = sum;
            }
        }
        __syncthreads();
        if (tiled) {
            C* const to = row_sums + (n * strips + strip) * T;
            for (int row = thread; row < height; row += threads)
                if (row + lead > 0) to[top + row] = rows[row];
            if (for_bands_above)
                for (int i = thread; i < width; i += threads)
                    column_sums[(n * bands + band) * T + start + i] = slots.base[slots.place(i)];
        } else {
            X* const to = out + matrix.offset(out_0, out_1, out_2, out_3);
            const int of_strip = walkers * lanes;
            for (int64 k = strip * of_strip + thread % of_strip; active && k < T;
                 k += strips * of_strip) {
                const C* part = rows - strip * row_slots + k;  // of strip 0
                C total = 0;
                for (int64 s = 0; s * width < k; ++s)
                    total = s == 0 ? *part : add(total, part[s * (row_slots - width)]);
                round_to(total, to[k * out_t]);
            }
        }
        __syncthreads();  // before the next block of matrices writes into shared memory
    }
}

// For k in a band: what the band's own rows give, strip by strip; and from the bands below, the
// sums of the tiles to the left of the band and, column by column, of the tiles beneath it.
template <class X>
__global__ void __launch_bounds__(256) exp_segsum_backward_combine(
    const typename Compute<X>::type* row_sums, const typename Compute<X>::type* column_sums,
    const typename Compute<X>::type* tile_sums,
    X* out, int64 out_0, int64 out_1, int64 out_2, int64 out_3, int64 out_t,
    int64 size_1, int64 size_2, int64 size_3,
    int64 matrices, int64 T, int64 strips, int64 bands, int64 width) {
    typedef typename Compute<X>::type C;
    const int WARP = 32, WARPS = 2 * BAND_ROWS / WARP;
    __shared__ C left_of_warp[WARPS], beneath_warp[WARPS], beneath[BAND_ROWS];
    const int x = threadIdx.x, thread = threadIdx.y * BAND_ROWS + x, warp = thread / WARP;

    for (int64 item = blockIdx.x; item < matrices * bands; item += gridDim.x) {
        const int64 n = item / bands, band = item % bands, top = band * BAND_ROWS, k = top + x;
        C left = 0, own = 0;
        for (int64 s = thread; s * width < top; s += 2 * BAND_ROWS)
#pragma unroll 4
            for (int64 below = bands - 1; below > band; --below)
                left = add(left, tile_sums[(n * bands + below) * strips + s]);
        left = sum_over_lanes(left, WARP);
        if (threadIdx.y == 0 && k < T) {
#pragma unroll 8
            for (int64 below = bands - 1; below > band; --below)
                own = add(own, column_sums[(n * bands + below) * T + k]);
        }
        if (threadIdx.y == 1 && k < T) {
#pragma unroll 8
            for (int64 s = 0; s * width < k; ++s)
                own = add(own, row_sums[(n * strips + s) * T + k]);
        }
        const C lower = sum_over_lower_lanes(own, WARP);
        if (x % WARP == WARP - 1) {
            left_of_warp[warp] = left;
            beneath_warp[warp] = add(lower, own);
        }
        if (threadIdx.y == 0) beneath[x] = lower;
        __syncthreads();
        if (threadIdx.y == 1 && k < T) {
            C others = 0;
            for (int w = 0; w < WARPS; ++w) others = add(others, left_of_warp[w]);
            for (int w = 0; w < x / WARP; ++w) others = add(others, beneath_warp[w]);
            const Leading matrix(n, size_1, size_2, size_3);
            round_to(add(own, add(others, beneath[x])),
                     out[matrix.offset(out_0, out_1, out_2, out_3) + k * out_t]);
        }
        __syncthreads();  // before the next band writes into shared memory
    }
}
