// What every kernel shares: storage and compute types, exact arithmetic, 16-byte loads and stores.
//
// The text of this file is placed before each .cu file; there are no include directives, since
// the cache of compiled kernels does not look into included files. No standard or CUDA header is
// used: <cstdint> and cuda_fp16.h are not there at run time.
//
// Arithmetic is inline PTX for two reasons. CuPy compiles with -ftz=true, which would flush
// subnormal float32 values in `a * b`, in conversions and in comparisons; and the compiler may not
// contract an inline product and sum into a fused multiply-add. So each step rounds once, to
// nearest even, exactly as NumPy's does.

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;

// ---- storage types -----------------------------------------------------------------------------

struct f16 { uint16 bits; };   // IEEE binary16
struct bf16 { uint16 bits; };  // the upper half of an IEEE binary32
typedef float f32;
typedef double f64;

// The compute type: double if any operand is double, else float.
template <class A, class B = A> struct Compute { typedef float type; };
template <class B> struct Compute<double, B> { typedef double type; };
template <class A> struct Compute<A, double> { typedef double type; };
template <> struct Compute<double, double> { typedef double type; };

// ---- arithmetic: one rounding each, subnormals kept ----------------------------------------------

__device__ __forceinline__ float mul(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float add(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ double mul(double a, double b) {
    double r;
    asm("mul.rn.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
    return r;
}
__device__ __forceinline__ double add(double a, double b) {
    double r;
    asm("add.rn.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
    return r;
}
__device__ __forceinline__ double widen(double a) { return a; }
__device__ __forceinline__ double widen(float a) {
    double r;
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(a));
    return r;
}
__device__ __forceinline__ float narrow(double a) {
    float r;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(a));
    return r;
}

// ---- storage <-> compute -------------------------------------------------------------------------

__device__ __forceinline__ float to_float(f16 a) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a.bits));
    return r;
}
__device__ __forceinline__ float to_float(bf16 a) { return __uint_as_float((uint32)a.bits << 16); }

template <class C, class S> struct Load;
template <class S> struct Load<float, S> {
    static __device__ __forceinline__ float from(S a) { return to_float(a); }
};
template <> struct Load<float, float> {
    static __device__ __forceinline__ float from(float a) { return a; }
};
template <class S> struct Load<double, S> {
    static __device__ __forceinline__ double from(S a) { return widen(to_float(a)); }
};
template <> struct Load<double, float> {
    static __device__ __forceinline__ double from(float a) { return widen(a); }
};
template <> struct Load<double, double> {
    static __device__ __forceinline__ double from(double a) { return a; }
};

__device__ __forceinline__ void round_to(float a, float& r) { r = a; }
__device__ __forceinline__ void round_to(float a, f16& r) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(a));
}
__device__ __forceinline__ void round_to(float a, bf16& r) {
    // To nearest even in integers (cvt.rn.bf16.f32 needs sm_80); a NaN stays a quiet NaN.
    uint32 bits = __float_as_uint(a);
    uint32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    r.bits = (uint16)(nan ? (bits >> 16) | 0x40u : rounded);
}
__device__ __forceinline__ void round_to(float a, double& r) { r = widen(a); }
__device__ __forceinline__ void round_to(double a, double& r) { r = a; }
__device__ __forceinline__ void round_to(double a, float& r) { r = narrow(a); }
__device__ __forceinline__ void round_to(double a, f16& r) { round_to(narrow(a), r); }
__device__ __forceinline__ void round_to(double a, bf16& r) { round_to(narrow(a), r); }

// ---- groups of elements --------------------------------------------------------------------------

// Elements a thread owns: 16 bytes of the activations' storage type.
template <class S> struct Width { static const int value = 16 / sizeof(S); };
// Rows that a thread loads before it uses the first: enough bytes in flight to hide the latency of
// memory, few enough registers for two blocks on a multiprocessor (one where 16-bit activations meet
// float64 parameters).
template <class S, bool VECTOR> struct Unroll {
    static const int value = !VECTOR ? 1 : sizeof(S) == 2 ? 2 : 4;
};

// What one memory instruction moves.
template <int BYTES> struct Packet;
template <> struct Packet<4> { typedef uint32 type; };
template <> struct Packet<8> { typedef uint2 type; };
template <> struct Packet<16> { typedef uint4 type; };

// Packed by the word: a union of elements and packet would be stored element by element.
__device__ __forceinline__ uint32 word(f16 a, f16 b) { return a.bits | (uint32)b.bits << 16; }
__device__ __forceinline__ uint32 word(bf16 a, bf16 b) { return a.bits | (uint32)b.bits << 16; }
template <class S> __device__ __forceinline__ void pack(const S (&e)[2], uint32& p) {
    p = word(e[0], e[1]);
}
template <class S> __device__ __forceinline__ void pack(const S (&e)[4], uint2& p) {
    p = make_uint2(word(e[0], e[1]), word(e[2], e[3]));
}
template <class S> __device__ __forceinline__ void pack(const S (&e)[8], uint4& p) {
    p = make_uint4(word(e[0], e[1]), word(e[2], e[3]), word(e[4], e[5]), word(e[6], e[7]));
}
__device__ __forceinline__ void pack(const float (&e)[2], uint2& p) {
    p = make_uint2(__float_as_uint(e[0]), __float_as_uint(e[1]));
}
__device__ __forceinline__ void pack(const float (&e)[4], uint4& p) {
    p = make_uint4(__float_as_uint(e[0]), __float_as_uint(e[1]), __float_as_uint(e[2]),
                   __float_as_uint(e[3]));
}
__device__ __forceinline__ void pack(const double (&e)[2], uint4& p) {
    p = make_uint4(__double2loint(e[0]), __double2hiint(e[0]), __double2loint(e[1]),
                   __double2hiint(e[1]));
}

// N elements, `step` elements apart, of which the first `count` exist. The vector form needs all of
// them, step 1 and an address that is a multiple of min(16, their bytes), and moves that many bytes
// at a time. Plain loads, not the read-only path: an output may be the very view of an input.
template <bool VECTOR, class C, class S, int N>
__device__ __forceinline__ void load(const S* address, int64 step, int count, C (&values)[N]) {
    if (VECTOR) {
        const int bytes = sizeof(S) * N < 16 ? sizeof(S) * N : 16;
        const int each = bytes / sizeof(S);
        typedef typename Packet<bytes>::type P;
#pragma unroll
        for (int p = 0; p < N / each; ++p) {
            union { P packet; S element[each]; } u;
            u.packet = reinterpret_cast<const P*>(address)[p];
#pragma unroll
            for (int i = 0; i < each; ++i) values[p * each + i] = Load<C, S>::from(u.element[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = i < count ? Load<C, S>::from(address[i * step]) : C(0);
    }
}

template <bool VECTOR, class C, class S, int N>
__device__ __forceinline__ void store(S* address, int64 step, int count, const C (&values)[N]) {
    if (VECTOR) {
        const int bytes = sizeof(S) * N < 16 ? sizeof(S) * N : 16;
        const int each = bytes / sizeof(S);
        typedef typename Packet<bytes>::type P;
#pragma unroll
        for (int p = 0; p < N / each; ++p) {
            S element[each];
#pragma unroll
            for (int i = 0; i < each; ++i) round_to(values[p * each + i], element[i]);
            P packet;
            pack(element, packet);
            reinterpret_cast<P*>(address)[p] = packet;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) round_to(values[i], address[i * step]);
    }
}

// The columns of one thread: N neighbours for the vector form; for the scalar form every
// blockDim.x-th, so that neighbouring threads touch neighbouring elements.
template <bool VECTOR, int N> struct Columns {
    int64 first, step;
    int count;
    __device__ __forceinline__ Columns(int64 tile, int64 size) {
        int64 start = tile * blockDim.x * N;
        first = start + (VECTOR ? threadIdx.x * N : threadIdx.x);
        step = VECTOR ? 1 : blockDim.x;
        count = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) count += first + i * step < size;
    }
};

// ---- leading axes --------------------------------------------------------------------------------

// The index of matrix n along four leading axes, of which the outermost has no size of its own.
struct Leading {
    int64 index[4];
    __device__ __forceinline__ Leading(int64 n, int64 size1, int64 size2, int64 size3) {
        index[3] = size3 > 1 ? n % size3 : 0;
        if (size3 > 1) n /= size3;
        index[2] = size2 > 1 ? n % size2 : 0;
        if (size2 > 1) n /= size2;
        index[1] = size1 > 1 ? n % size1 : 0;
        if (size1 > 1) n /= size1;
        index[0] = n;
    }
    __device__ __forceinline__ int64 offset(int64 s0, int64 s1, int64 s2, int64 s3) const {
        return index[0] * s0 + index[1] * s1 + index[2] * s2 + index[3] * s3;
    }
};
