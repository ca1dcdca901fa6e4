// Registers and memory access of a translated kernel.
//
// The same translated text compiles in two modes, plain.h and checked.h (-DPTX_CHECKED); what
// both share is here.

#pragma once
#ifdef PTX_CHECKED
#include "checked.h"
#else
#include "plain.h"
#endif

using pred_t = Register<bool>;
using b8_t = Register<uint8_t>;
using b16_t = Register<uint16_t>;
using b32_t = Register<uint32_t>;
using b64_t = Register<uint64_t>;

template <class R>
using bits_of = decltype(value_of(R()));

// Writes a register from value and poison; the plain mode has no room for the latter.
template <class Bits>
PTX_INLINE Register<Bits> make(Bits value, Bits poison) {
#ifdef PTX_CHECKED
  return {value, poison};
#else
  return value;
#endif
}

// ---- packing: mov between a register and a vector of narrower ones ------------------------------

template <class Wide, class Narrow>
PTX_INLINE Register<Wide> pack(Narrow low, Narrow high) {
  constexpr int shift = 8 * sizeof(bits_of<Narrow>);
  return make<Wide>(Wide(value_of(high)) << shift | value_of(low),
                    Wide(poison_of(high)) << shift | poison_of(low));
}
template <class Narrow, int Part, class Wide>
PTX_INLINE Register<Narrow> part(Wide a) {
  constexpr int shift = Part * 8 * sizeof(Narrow);
  return make<Narrow>(Narrow(value_of(a) >> shift), Narrow(poison_of(a) >> shift));
}

// ---- branches and addresses: here poison becomes an error ---------------------------------------

PTX_INLINE bool taken(Thread* t, pred_t p, Site site) {
  if (__builtin_expect(poison_of(p), 0)) t->services->misuse(t, POISON_BRANCH, site);
  return value_of(p);
}
template <class Address>
PTX_INLINE uint64_t clean_address(Thread* t, Address a, Site site) {
  if (__builtin_expect(poison_of(a) != 0, 0)) t->services->misuse(t, POISON_ADDRESS, site);
  return value_of(a);
}

// ---- memory ----------------------------------------------------------------------------------

template <class Bits, int Count>
struct Loaded {
  Register<Bits> e[Count];
};
template <class T, int Count, class Address>
PTX_INLINE auto load(Thread* t, Space space, Address base, int64_t offset, Site site) {
  Loaded<typename T::bits, Count> result;
  fetch<T, Count>(t, space, clean_address(t, base, site) + uint64_t(offset), site, result.e);
  return result;
}
template <class T, class Address, class... Values>
PTX_INLINE void store(Thread* t, Space space, Address base, int64_t offset, Site site,
                      Values... values) {
  const Register<typename T::bits> source[] = {values...};
  put<T, sizeof...(values)>(t, space, clean_address(t, base, site) + uint64_t(offset), site,
                            source);
}
template <class T>
PTX_INLINE Register<typename T::bits> parameter(Thread* t, int offset) {
  typename T::bits value;
  memcpy(&value, t->params + offset, sizeof value);
  return value;
}

// ---- warp operations ---------------------------------------------------------------------------

struct WarpResult {
  b32_t value;
  pred_t predicate;
};

PTX_INLINE b32_t widened(pred_t p) { return make<uint32_t>(value_of(p), poison_of(p)); }

PTX_INLINE WarpResult warp(Thread* t, WarpOperation operation, b32_t a, b32_t b, b32_t c,
                           b32_t mask, Site site) {
  if (poison_of(b) | poison_of(c) | poison_of(mask)) t->services->misuse(t, POISON_OPERAND, site);
  WarpRequest request = {operation, value_of(mask), value_of(a), value_of(b), value_of(c),
                         poison_of(a), site, false};
  t->services->warp(t, &request);
  // The predicate of a shuffle is about lanes, that of a vote about the values.
  const bool spoiled = operation >= VOTE_BALLOT && request.poison;
  return {make<uint32_t>(request.a, request.poison), make<bool>(request.predicate, spoiled)};
}
