// Checked registers: every bit has a shadow bit, set where the bit is poison.
//
// Poison is no error until it is used: in a store to global memory, a branch or an address. So a
// vector load may fetch neighbours that were never written, if the kernel selects them away.

#pragma once
#include "abi.h"
#include "conversions.h"
#include "floats.h"
#include "integers.h"
#include "selection.h"

#include <utility>

template <class Bits>
struct Register {
  Bits v;
  Bits p;
  Register() : v(0), p(Bits(~Bits(0))) {}  // a register starts undefined
  Register(Bits value) : v(value), p(0) {}
  Register(Bits value, Bits poison) : v(value), p(poison) {}
};
template <>
inline Register<bool>::Register() : v(false), p(true) {}

template <class Bits>
PTX_INLINE Bits value_of(Register<Bits> a) { return a.v; }
template <class Bits>
PTX_INLINE Bits poison_of(Register<Bits> a) { return a.p; }

#define COUNT(n) t->instructions += (n)

// ---- how poison passes through an instruction: one wrapper per rule --------------------------

// any: one poisoned bit in any operand spoils the whole result.
template <class F, class... Bits>
PTX_INLINE auto any(Register<Bits>... a) {
  using R = decltype(F::go(a.v...));
  const bool poisoned = (... || bool(a.p));
  return Register<R>(F::go(a.v...), poisoned ? R(~R(0)) : R(0));
}


// moves: bits only change places, so the shadow takes the same way. Operands after the first
// `Data` ones steer the move (shift amounts, selectors) and must be clean.
template <class F, int Data, size_t... I, class... Bits>
PTX_INLINE auto moves_at(std::index_sequence<I...>, Register<Bits>... a) {
  using R = decltype(F::go(a.v...));
  const bool lost = (... || (int(I) >= Data && a.p != 0));
  return Register<R>(F::go(a.v...), lost ? R(~R(0)) : F::go((int(I) < Data ? a.p : a.v)...));
}
template <class F, int Data, class... Bits>
PTX_INLINE auto moves(Register<Bits>... a) {
  return moves_at<F, Data>(std::index_sequence_for<Bits...>(), a...);
}

// logic: a result bit is poison only if flipping poisoned operand bits can change it.
template <class F, size_t... I, class... Bits>
PTX_INLINE auto logic_at(std::index_sequence<I...>, Register<Bits>... a) {
  using R = decltype(F::go(a.v...));
  const R value = F::go(a.v...);
  R poison = 0;
  if ((... || bool(a.p)))
    for (unsigned flips = 1; flips < 1u << sizeof...(a); ++flips)
      poison = R(poison | (value ^ F::go(Bits(a.v ^ (flips >> I & 1 ? a.p : Bits(0)))...)));
  return Register<R>(value, poison);
}
template <class F, class... Bits>
PTX_INLINE auto logic(Register<Bits>... a) {
  return logic_at<F>(std::index_sequence_for<Bits...>(), a...);
}

// picks: the last operand chooses between the first two and must be clean.
template <class F, class Bits, class Chooser>
PTX_INLINE auto picks(Register<Bits> a, Register<Bits> b, Register<Chooser> c) {
  const Bits value = F::go(a.v, b.v, c.v);
  return Register<Bits>(value, c.p ? Bits(~Bits(0)) : F::go(a.p, b.p, c.v));
}

// divides: as any, and division by zero has no defined result.
template <class F, class Bits>
PTX_INLINE auto divides(Register<Bits> a, Register<Bits> b) {
  return Register<Bits>(F::go(a.v, b.v), a.p || b.p || b.v == 0 ? Bits(~Bits(0)) : Bits(0));
}

// ---- memory: every access asks the runtime ------------------------------------------------------

template <class T, int Count>
PTX_INLINE void fetch(Thread* t, Space space, uint64_t address, Site site,
                      Register<typename T::bits>* result) {
  typename T::bits value[Count], poison[Count];
  t->services->load(t, space, address, sizeof value, site, value, poison);
  for (int i = 0; i < Count; ++i) result[i] = {value[i], poison[i]};
}
template <class T, int Count>
PTX_INLINE void put(Thread* t, Space space, uint64_t address, Site site,
                    const Register<typename T::bits>* source) {
  typename T::bits value[Count], poison[Count];
  for (int i = 0; i < Count; ++i) value[i] = source[i].v, poison[i] = source[i].p;
  t->services->store(t, space, address, sizeof value, site, value, poison);
}
