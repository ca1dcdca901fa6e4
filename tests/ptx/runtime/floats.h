// Arithmetic on singles and doubles. IEEE 754, to nearest, ties to even; host and device agree.

#pragma once
#include "semantics.h"

namespace op {

#define PTX_FLOAT_BINARY(Name, expression)                               \
  template <class T, bool Ftz>                                           \
  struct Name {                                                          \
    using bits = typename T::bits;                                       \
    PTX_INLINE bits go(bits a_, bits b_) {                               \
      const auto a = in<T, Ftz>(a_), b = in<T, Ftz>(b_);                 \
      return finish<Ftz>(expression);                                    \
    }                                                                    \
  };
PTX_FLOAT_BINARY(FloatAdd, a + b)
PTX_FLOAT_BINARY(FloatSub, a - b)
PTX_FLOAT_BINARY(FloatMul, a* b)
PTX_FLOAT_BINARY(FloatDiv, a / b)

template <class T, bool Ftz>
struct FloatFma {
  using bits = typename T::bits;
  PTX_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  PTX_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
  PTX_INLINE bits go(bits a, bits b, bits c) {
    return finish<Ftz>(fused(in<T, Ftz>(a), in<T, Ftz>(b), in<T, Ftz>(c)));
  }
};
template <class T, bool Ftz>
struct FloatRcp {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a) { return finish<Ftz>(typename T::value(1) / in<T, Ftz>(a)); }
};
template <class T, bool Ftz>
struct FloatSqrt {
  using bits = typename T::bits;
  PTX_INLINE float root(float a) { return __builtin_sqrtf(a); }
  PTX_INLINE double root(double a) { return __builtin_sqrt(a); }
  PTX_INLINE bits go(bits a) { return finish<Ftz>(root(in<T, Ftz>(a))); }
};
template <class T>
constexpr typename T::bits sign_bit = typename T::bits(1) << (T::width - 1);

template <class T, bool Ftz>
struct FloatNeg {
  PTX_INLINE typename T::bits go(typename T::bits a) { return flush<Ftz>(a) ^ sign_bit<T>; }
};
template <class T, bool Ftz>
struct FloatAbs {
  PTX_INLINE typename T::bits go(typename T::bits a) { return flush<Ftz>(a) & ~sign_bit<T>; }
};
// copysign.f32 d, a, b: the sign of a on the magnitude of b.
template <class T>
struct CopySign {
  PTX_INLINE typename T::bits go(typename T::bits a, typename T::bits b) {
    return (a & sign_bit<T>) | (b & ~sign_bit<T>);
  }
};

// min and max: a NaN loses against a number unless .NaN is given, and -0 is less than +0.
template <class T, bool Ftz, bool Max, bool PropagateNaN>
struct FloatExtreme {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a_, bits b_) {
    const bits x = flush<Ftz>(a_), y = flush<Ftz>(b_);
    const auto a = T::get(x), b = T::get(y);
    if (a != a || b != b) {
      if (PropagateNaN || (a != a && b != b)) return finish<Ftz>(a + b);
      return a != a ? y : x;
    }
    if (a == b) return Max ? x & y : x | y;  // equal numbers differ at most in the sign of zero
    return (a < b) != Max ? x : y;
  }
};

enum Property { FINITE, INFINITE, NUMBER, NOTANUMBER, NORMAL, SUBNORMAL };
template <class T, int Kind>
struct TestProperty {
  PTX_INLINE bool go(typename T::bits b) {
    const auto v = T::get(b);
    switch (Kind) {
      case FINITE: return __builtin_isfinite(v);
      case INFINITE: return __builtin_isinf(v);
      case NUMBER: return !__builtin_isnan(v);
      case NOTANUMBER: return __builtin_isnan(v);
      case NORMAL: return __builtin_isnormal(v);
      default: return v != 0 && __builtin_isfinite(v) && !__builtin_isnormal(v);
    }
  }
};

}  // namespace op
