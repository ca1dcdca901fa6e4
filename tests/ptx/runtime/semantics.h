// What each PTX instruction computes, as pure functions of bit patterns.
//
// Every operation is a struct with a static `go`, so that one wrapper can apply it to plain bits
// and another to bits with a validity shadow (registers.h). Registers are untyped in PTX: the
// instruction says how to read the bits, so floats are cast in and out here and nowhere else.
//
// Compiled with -ffp-contract=off: the compiler may never fuse a multiplication and an addition.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#define PTX_INLINE static inline __attribute__((always_inline))

namespace op {

template <class To, class From>
PTX_INLINE To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// An instruction type: how many bits, and the C++ type in which they are computed.
template <class Bits, class Value>
struct Type {
  using bits = Bits;
  using value = Value;
  static constexpr int width = 8 * sizeof(Bits);
  PTX_INLINE Value get(Bits b) { return cast<Value>(b); }
  PTX_INLINE Bits put(Value v) { return cast<Bits>(v); }
};
struct u8 : Type<uint8_t, uint8_t> {};
struct s8 : Type<uint8_t, int8_t> {};
struct u16 : Type<uint16_t, uint16_t> {};
struct s16 : Type<uint16_t, int16_t> {};
struct u32 : Type<uint32_t, uint32_t> {};
struct s32 : Type<uint32_t, int32_t> {};
struct u64 : Type<uint64_t, uint64_t> {};
struct s64 : Type<uint64_t, int64_t> {};
struct f32 : Type<uint32_t, float> {};
struct f64 : Type<uint64_t, double> {};
struct f16 : Type<uint16_t, uint16_t> {};   // carried as bits
struct bf16 : Type<uint16_t, uint16_t> {};  // carried as bits
struct pred : Type<bool, bool> {};

template <class A, class B>
struct same {
  static constexpr bool value = false;
};
template <class A>
struct same<A, A> {
  static constexpr bool value = true;
};
template <class T>
constexpr bool is_float = same<T, f32>::value || same<T, f64>::value;
template <class T>
constexpr bool is_signed = typename T::value(-1) < typename T::value(0);

// ---- floating point -----------------------------------------------------------------------

// .ftz: a subnormal single becomes a zero of its sign. Doubles have no .ftz.
template <bool Ftz>
PTX_INLINE uint32_t flush(uint32_t b) {
  return Ftz && (b & 0x7f800000u) == 0 ? b & 0x80000000u : b;
}
template <bool Ftz>
PTX_INLINE uint64_t flush(uint64_t b) {
  static_assert(!Ftz, "f64 has no .ftz");
  return b;
}

// Single precision instructions return the one NaN 0x7fffffff, whatever NaN went in. A rounding
// to bfloat16 by integer arithmetic that forgets NaN therefore fails here as it fails on a GPU.
// PTX leaves the payload of a double NaN open.
template <bool Ftz>
PTX_INLINE uint32_t finish(float v) {
  return v != v ? 0x7fffffffu : flush<Ftz>(cast<uint32_t>(v));
}
template <bool Ftz>
PTX_INLINE uint64_t finish(double v) {
  return cast<uint64_t>(v);
}

template <class T, bool Ftz>
PTX_INLINE typename T::value in(typename T::bits b) {
  return T::get(flush<Ftz>(b));
}

}  // namespace op
