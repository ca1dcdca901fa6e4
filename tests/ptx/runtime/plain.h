// Plain registers: just the bits, and an access is a memcpy. For speed.

#pragma once
#include "abi.h"
#include "conversions.h"
#include "floats.h"
#include "integers.h"
#include "selection.h"

template <class Bits>
using Register = Bits;

template <class Bits>
PTX_INLINE Bits value_of(Bits a) { return a; }
template <class Bits>
PTX_INLINE Bits poison_of(Bits) { return 0; }

#define COUNT(n)

// The rules of checked.h all mean the same here.
template <class F, class... Bits>
PTX_INLINE auto any(Bits... a) { return F::go(a...); }
template <class F, int Data, class... Bits>
PTX_INLINE auto moves(Bits... a) { return F::go(a...); }
template <class F, class... Bits>
PTX_INLINE auto logic(Bits... a) { return F::go(a...); }
template <class F, class... Bits>
PTX_INLINE auto picks(Bits... a) { return F::go(a...); }
template <class F, class... Bits>
PTX_INLINE auto divides(Bits... a) { return F::go(a...); }

PTX_INLINE unsigned char* host(Thread* t, Space space, uint64_t address) {
  if (space == SHARED) return t->shared + address;
  if (space == GENERIC && address >= SHARED_WINDOW) return t->shared + (address - SHARED_WINDOW);
  return reinterpret_cast<unsigned char*>(address);
}
template <class T, int Count>
PTX_INLINE void fetch(Thread* t, Space space, uint64_t address, Site, typename T::bits* result) {
  memcpy(result, host(t, space, address), Count * sizeof *result);
}
template <class T, int Count>
PTX_INLINE void put(Thread* t, Space space, uint64_t address, Site,
                    const typename T::bits* source) {
  memcpy(host(t, space, address), source, Count * sizeof *source);
}
