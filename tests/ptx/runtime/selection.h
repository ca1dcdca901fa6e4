// Comparison and selection.

#pragma once
#include "semantics.h"

namespace op {

enum Compare { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
// The forms that end in u are also true when a NaN takes part; integers never are unordered.
template <class T, int Kind, bool Ftz>
struct Test {
  PTX_INLINE bool go(typename T::bits a_, typename T::bits b_) {
    typename T::value a, b;
    if constexpr (is_float<T>) {
      a = in<T, Ftz>(a_), b = in<T, Ftz>(b_);
    } else {
      a = T::get(a_), b = T::get(b_);
    }
    const bool unordered = a != a || b != b;
    switch (Kind) {
      case EQ: return a == b;
      case NE: return !unordered && a != b;
      case LT: return a < b;
      case LE: return a <= b;
      case GT: return a > b;
      case GE: return a >= b;
      case EQU: return unordered || a == b;
      case NEU: return unordered || a != b;
      case LTU: return unordered || a < b;
      case LEU: return unordered || a <= b;
      case GTU: return unordered || a > b;
      case GEU: return unordered || a >= b;
      case NUM: return !unordered;
      default: return unordered;
    }
  }
};
// set: a comparison stored as all ones or 1.0f; `Bool` may combine it with a predicate.
template <class Comparison, class R>
struct SetTo {
  template <class B>
  PTX_INLINE uint32_t go(B a, B b) {
    return Comparison::go(a, b) ? (same<R, f32>::value ? 0x3f800000u : 0xffffffffu) : 0;
  }
};
template <class Comparison, class R, class Bool>
struct SetToWith {
  template <class B>
  PTX_INLINE uint32_t go(B a, B b, bool c) {
    return Bool::go(Comparison::go(a, b), c) ? (same<R, f32>::value ? 0x3f800000u : 0xffffffffu)
                                             : 0;
  }
};
template <class T>
struct Select {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, bits b, bool p) { return p ? a : b; }
};
// slct: a where c >= 0, else b; a NaN is not >= 0.
template <class T, class C, bool Ftz>
struct SelectBySign {
  using bits = typename T::bits;
  PTX_INLINE bits go(bits a, bits b, typename C::bits c) {
    if constexpr (is_float<C>) return in<C, Ftz>(c) >= 0 ? a : b;
    else return C::get(c) >= 0 ? a : b;
  }
};

}  // namespace op
