// Fibres: one call stack per thread of a block, switched by hand.
//
// x86-64 has its own switch of a dozen instructions; any other machine uses ucontext, which is
// slower but portable. Kernels hold no C++ objects with destructors, so a fibre may be abandoned.

#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#ifdef __x86_64__
// Both in runtime.cpp, in assembler; ptx_start calls enter() of the fibre that rbx points to.
extern "C" void ptx_switch(void** save, void* load);
extern "C" void ptx_start();
#endif

class Fibre {
 public:
  // Prepares the fibre to call body(argument) on the given stack when first switched to.
  void prepare(unsigned char* stack, size_t bytes, void (*body)(void*), void* argument) {
    body_ = body;
    argument_ = argument;
#ifdef __x86_64__
    auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15);
    auto frame = reinterpret_cast<void**>(top) - 7;  // ptx_start then sees an aligned stack
    for (int i = 0; i < 7; ++i) frame[i] = nullptr;
    frame[5] = this;                                  // popped into rbx
    frame[6] = reinterpret_cast<void*>(&ptx_start);  // returned to
    context_ = frame;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&context_, reinterpret_cast<void (*)()>(&start_split), 2, unsigned(self),
                unsigned(uint64_t(self) >> 32));
#endif
  }

  // Runs the body, which never returns.
  void enter() { body_(argument_); }

  // Leaves this fibre, which must be the running one, for another.
  void switch_to(Fibre& other) {
#ifdef __x86_64__
    ptx_switch(&context_, other.context_);
#else
    swapcontext(&context_, &other.context_);
#endif
  }

 private:
#ifdef __x86_64__
  void* context_ = nullptr;
#else
  static void start_split(unsigned low, unsigned high) {
    reinterpret_cast<Fibre*>(uintptr_t(uint64_t(high) << 32 | low))->enter();
  }
  ucontext_t context_;
#endif
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
};

// Stacks for all fibres of a block, mapped once; pages that are never touched cost nothing.
class Stacks {
 public:
  static constexpr size_t BYTES = 256 * 1024;

  explicit Stacks(size_t count) : bytes_(count * BYTES) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<unsigned char*>(p);
  }
  ~Stacks() {
    if (base_) munmap(base_, bytes_);
  }
  Stacks(const Stacks&) = delete;
  bool ok() const { return base_ != nullptr; }
  unsigned char* at(size_t i) { return base_ + i * BYTES; }
  // Stacks at multiples of a large power of two would all map to the same few cache sets.
  static size_t size(size_t i) { return BYTES - (i % 61) * 320; }

 private:
  unsigned char* base_;
  size_t bytes_;
};
