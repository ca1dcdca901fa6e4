// cvt: every conversion of the PTX instruction, again as pure functions of bit patterns.

#pragma once
#include "floats.h"

namespace op {

// Shortens or lengthens an integer; a signed source type extends its sign.
template <class From, class To>
struct Resize {
  PTX_INLINE typename To::bits go(typename From::bits a) {
    return typename To::bits(int64_t(From::get(a)));
  }
};
template <class From, class To>
struct ResizeSaturate {
  PTX_INLINE typename To::bits go(typename From::bits a) {
    constexpr __int128 most = is_signed<To> ? ((__int128)1 << (To::width - 1)) - 1
                                            : ((__int128)1 << To::width) - 1;
    constexpr __int128 least = is_signed<To> ? -most - 1 : (__int128)0;
    const __int128 v = From::get(a);
    return typename To::bits(v < least ? least : v > most ? most : v);
  }
};

enum Rounding { RNI, RZI, RMI, RPI };
template <int Mode>
PTX_INLINE double round_to_integer(double v) {
  return Mode == RNI   ? __builtin_rint(v)  // the host rounds to nearest, ties to even
         : Mode == RZI ? __builtin_trunc(v)
         : Mode == RMI ? __builtin_floor(v)
                       : __builtin_ceil(v);
}

// Out of range saturates. NaN gives 0, or the top bit alone where 64 bits take part.
template <class From, class To, int Mode, bool Ftz>
struct FloatToInt {
  PTX_INLINE typename To::bits go(typename From::bits a) {
    const double v = in<From, Ftz>(a);  // exact for both sources
    if (v != v) return From::width == 64 || To::width == 64 ? typename To::bits(1) << (To::width - 1) : 0;
    const double r = round_to_integer<Mode>(v);
    constexpr double beyond = is_signed<To> ? double(uint64_t(1) << (To::width - 1))
                                            : 2.0 * double(uint64_t(1) << (To::width - 1));
    if (r >= beyond) return is_signed<To> ? ~sign_bit<To> : typename To::bits(~typename To::bits(0));
    if (r < (is_signed<To> ? -beyond : 0.0)) return is_signed<To> ? sign_bit<To> : 0;
    return To::put(typename To::value(r));
  }
};
template <class From, class To>
struct IntToFloat {
  PTX_INLINE typename To::bits go(typename From::bits a) {
    return To::put(typename To::value(From::get(a)));
  }
};
template <class T, int Mode, bool Ftz>
struct RoundFloat {
  PTX_INLINE typename T::bits go(typename T::bits a) {
    return finish<Ftz>(typename T::value(round_to_integer<Mode>(in<T, Ftz>(a))));
  }
};

template <bool Ftz>
struct SingleToDouble {
  PTX_INLINE uint64_t go(uint32_t a) { return cast<uint64_t>(double(in<f32, Ftz>(a))); }
};
template <bool Ftz>
struct DoubleToSingle {
  PTX_INLINE uint32_t go(uint64_t a) { return finish<Ftz>(float(cast<double>(a))); }
};

PTX_INLINE double half_to_double(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  double magnitude;
  if (exponent == 31) magnitude = fraction ? __builtin_nan("") : __builtin_inf();
  else if (exponent == 0) magnitude = fraction * 0x1p-24;
  else magnitude = __builtin_ldexp(double(1024 + fraction), exponent - 25);
  return __builtin_copysign(magnitude, h & 0x8000 ? -1.0 : 1.0);
}
// One rounding from the exact value, whatever the source was; NaN becomes 0x7fff.
PTX_INLINE uint16_t double_to_half(double v) {
  if (v != v) return 0x7fff;
  const uint16_t sign = __builtin_signbit(v) ? 0x8000 : 0;
  const double magnitude = __builtin_fabs(v);
  if (magnitude >= 65520.0) return sign | 0x7c00;  // halfway between 65504 and 65536, and beyond
  if (magnitude < 0x1p-14) return sign | uint16_t(__builtin_rint(magnitude * 0x1p24));
  const int exponent = int(cast<uint64_t>(magnitude) >> 52) - 1023;
  const double scaled = __builtin_ldexp(magnitude, 10 - exponent);  // in [1024, 2048)
  // A fraction rounded up to 2048 carries into the exponent, as it should.
  return sign | uint16_t(((exponent + 14) << 10) + int(__builtin_rint(scaled)));
}

struct HalfToSingle {
  PTX_INLINE uint32_t go(uint16_t h) {
    // The exact product moves the exponent, subnormals included; infinity and NaN need their own.
    if ((h & 0x7c00) == 0x7c00)
      return h & 0x3ff ? 0x7fffffffu : uint32_t(h & 0x8000) << 16 | 0x7f800000u;
    const float magnitude = cast<float>(uint32_t(h & 0x7fff) << 13) * 0x1p112f;
    return cast<uint32_t>(magnitude) | uint32_t(h & 0x8000) << 16;
  }
};
struct HalfToDouble {
  PTX_INLINE uint64_t go(uint16_t h) { return cast<uint64_t>(half_to_double(h)); }
};
template <bool Ftz>
struct SingleToHalf {
  PTX_INLINE uint16_t go(uint32_t a) {
    const uint32_t b = flush<Ftz>(a), magnitude = b & 0x7fffffffu;
    const uint16_t sign = b >> 16 & 0x8000;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and beyond
    if (magnitude < 0x38800000u)                          // below 2^-14: a multiple of 2^-24
      return sign | uint16_t(__builtin_rintf(cast<float>(magnitude) * 0x1p24f));
    const uint32_t odd = magnitude >> 13 & 1;
    return sign | uint16_t((magnitude - 0x38000000u + 0xfff + odd) >> 13);
  }
};
struct DoubleToHalf {
  PTX_INLINE uint16_t go(uint64_t a) { return double_to_half(cast<double>(a)); }
};
struct BfloatToSingle {
  PTX_INLINE uint32_t go(uint16_t h) { return uint32_t(h) << 16; }
};
struct SingleToBfloat {
  PTX_INLINE uint16_t go(uint32_t a) {
    if ((a & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return uint16_t((a + 0x7fff + (a >> 16 & 1)) >> 16);
  }
};

}  // namespace op
