// Integer arithmetic, shifts and bit fields.

#pragma once
#include "semantics.h"

namespace op {

template <class T>
using wide = typename std::conditional_t<T::width == 16, std::conditional_t<is_signed<T>, s32, u32>,
                                         std::conditional_t<is_signed<T>, s64, u64>>;

// All of these wrap: they compute in unsigned arithmetic of 64 or 128 bits and drop the rest.
#define PTX_INT_BINARY(Name, expression)                    \
  template <class T>                                        \
  struct Name {                                             \
    using bits = typename T::bits;                          \
    PTX_INLINE bits go(bits a_, bits b_) {                  \
      const uint64_t a = a_, b = b_;                        \
      return bits(expression);                              \
    }                                                       \
  };
PTX_INT_BINARY(Add, a + b)
PTX_INT_BINARY(Sub, a - b)
PTX_INT_BINARY(MulLo, a* b)
PTX_INT_BINARY(And, a& b)
PTX_INT_BINARY(Or, a | b)
PTX_INT_BINARY(Xor, a ^ b)

template <class T>
using product = std::conditional_t<is_signed<T>, __int128, unsigned __int128>;

template <class T>
struct MulHi {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, bits b) {
    return bits((product<T>(T::get(a)) * product<T>(T::get(b))) >> T::width);
  }
};
template <class T>
struct MulWide {
  using bits = typename T::bits;
  using result = typename wide<T>::bits;
  PTX_INLINE result go(bits a, bits b) {
    return result(product<T>(T::get(a)) * product<T>(T::get(b)));
  }
};
// A multiplication followed by an addition that wraps at the width of the result.
template <class Mul>
struct MulAdd {
  template <class B, class C>
  PTX_INLINE C go(B a, B b, C c) {
    return C(uint64_t(Mul::go(a, b)) + uint64_t(c));
  }
};

// Division by zero is "an unspecified, machine-specific value": all ones and the dividend are
// what unsigned division gives on current devices. Checked registers mark the result as poison.
template <class T, bool Remainder>
struct Divide {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, bits b) {
    if (b == 0) return Remainder ? a : bits(~bits(0));
    if (is_signed<T> && b == bits(~bits(0))) return Remainder ? 0 : bits(0 - uint64_t(a));
    return Remainder ? T::put(T::get(a) % T::get(b)) : T::put(T::get(a) / T::get(b));
  }
};
template <class T>
struct Neg {
  PTX_INLINE typename T::bits go(typename T::bits a) { return typename T::bits(0 - uint64_t(a)); }
};
template <class T>
struct Abs {
  PTX_INLINE typename T::bits go(typename T::bits a) { return T::get(a) < 0 ? Neg<T>::go(a) : a; }
};
template <class T, bool Max>
struct Extreme {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, bits b) { return (T::get(a) < T::get(b)) != Max ? a : b; }
};
template <class T>
struct Not {
  PTX_INLINE typename T::bits go(typename T::bits a) {
    return same<T, pred>::value ? typename T::bits(!a) : typename T::bits(~a);
  }
};
template <class T>
struct LogicalNot {
  PTX_INLINE typename T::bits go(typename T::bits a) { return a == 0; }
};

// Shift amounts are unsigned 32-bit values, clamped to the width.
template <class T>
struct ShiftLeft {
  PTX_INLINE typename T::bits go(typename T::bits a, uint32_t n) {
    return n >= uint32_t(T::width) ? 0 : typename T::bits(uint64_t(a) << n);
  }
};
template <class T>
struct ShiftRight {
  PTX_INLINE typename T::bits go(typename T::bits a, uint32_t n) {
    if (n >= uint32_t(T::width)) return is_signed<T> && T::get(a) < 0 ? ~typename T::bits(0) : 0;
    return T::put(typename T::value(T::get(a) >> n));
  }
};
// shf: 32 bits out of the pair (hi, lo), shifted left or right.
template <bool Left, bool Wrap>
struct FunnelShift {
  PTX_INLINE uint32_t go(uint32_t lo, uint32_t hi, uint32_t n) {
    n = Wrap ? n & 31 : (n > 32 ? 32 : n);
    const uint64_t pair = uint64_t(hi) << 32 | lo;
    return Left ? uint32_t((pair << n) >> 32) : uint32_t(pair >> n);
  }
};

template <class T>
struct PopCount {
  PTX_INLINE uint32_t go(typename T::bits a) { return __builtin_popcountll(a); }
};
template <class T>
struct LeadingZeros {
  PTX_INLINE uint32_t go(typename T::bits a) {
    return a == 0 ? T::width : __builtin_clzll(a) - (64 - T::width);
  }
};
// bfind: the highest bit that differs from the sign (of an unsigned: the highest set bit).
template <class T, bool ShiftAmount>
struct FindBit {
  PTX_INLINE uint32_t go(typename T::bits a) {
    const typename T::bits b = T::get(a) < 0 ? typename T::bits(~a) : a;
    if (b == 0) return 0xffffffffu;
    const uint32_t position = T::width - 1 - LeadingZeros<T>::go(b);
    return ShiftAmount ? T::width - 1 - position : position;
  }
};
template <class T>
struct Reverse {
  PTX_INLINE typename T::bits go(typename T::bits a) {
    typename T::bits r = 0;
    for (int i = 0; i < T::width; ++i) r = typename T::bits(r << 1) | ((a >> i) & 1);
    return r;
  }
};
// bfe: `length` bits from `position`; beyond the top, and above the field, comes the field's sign.
template <class T>
struct FieldExtract {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, uint32_t position, uint32_t length) {
    position &= 0xff;
    length &= 0xff;
    if (length == 0) return 0;
    const uint32_t top = T::width - 1;
    const uint32_t last = position + length - 1 < top ? position + length - 1 : top;
    const bool sign = is_signed<T> && ((a >> last) & 1);
    const bits shifted = position > top ? 0 : bits(a >> position);
    const bits keep = length > top ? bits(~bits(0)) : bits((bits(1) << length) - 1);
    const uint32_t present = position > top ? 0 : top + 1 - position;  // real bits above position
    const bits real = present > top ? bits(~bits(0)) : bits((bits(1) << present) - 1);
    const bits field = keep & real;
    return (shifted & field) | (sign ? bits(~field) : 0);
  }
};
// bfi: the low `length` bits of a replace those of b from `position` on.
template <class T>
struct FieldInsert {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, bits b, uint32_t position, uint32_t length) {
    position &= 0xff;
    length &= 0xff;
    if (length == 0 || position >= uint32_t(T::width)) return b;
    const bits low = length >= uint32_t(T::width) ? bits(~bits(0)) : bits((bits(1) << length) - 1);
    const bits field = bits(low << position);
    return (b & ~field) | (bits(a << position) & field);
  }
};
// prmt: four nibbles of the selector each pick a byte of (b, a); its top bit asks for the sign.
struct Permute {
  PTX_INLINE uint32_t go(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t pair = uint64_t(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibble = selector >> (4 * i) & 0xf;
      uint32_t byte = uint32_t(pair >> (8 * (nibble & 7))) & 0xff;
      if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
      r |= byte << (8 * i);
    }
    return r;
  }
};
template <uint32_t Table>
struct Lop3 {
  PTX_INLINE uint32_t go(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r = 0;
    for (int i = 0; i < 8; ++i)
      if (Table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return r;
  }
};

}  // namespace op
