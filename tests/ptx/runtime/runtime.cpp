// The scheduler: blocks one after another, the threads of a block as fibres that are switched at
// barriers and warp operations only.

#include "machine.h"

#include <string.h>

Machine* machine = nullptr;

#ifdef __x86_64__
// Saves the registers that a call preserves, changes stacks, restores the other fibre's.
asm(R"(
.text
.globl ptx_switch
.type ptx_switch, @function
ptx_switch:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret
.size ptx_switch, .-ptx_switch

.type ptx_start, @function
ptx_start:
  movq %rbx, %rdi
  call ptx_enter
  ud2
.size ptx_start, .-ptx_start
)");

extern "C" void ptx_enter(Fibre* fibre) { fibre->enter(); }
#endif

static void service_barrier(Thread* t, Site site) { machine->barrier(t, site); }
static void service_warp(Thread* t, WarpRequest* request) { machine->warp_operation(t, request); }
static void service_load(Thread* t, Space space, uint64_t address, uint32_t bytes, Site site,
                         void* value, void* poison) {
  machine->load(t, space, address, bytes, site, static_cast<unsigned char*>(value),
                static_cast<unsigned char*>(poison));
}
static void service_store(Thread* t, Space space, uint64_t address, uint32_t bytes, Site site,
                          const void* value, const void* poison) {
  machine->store(t, space, address, bytes, site, static_cast<const unsigned char*>(value),
                 static_cast<const unsigned char*>(poison));
}
static void service_misuse(Thread* t, Misuse misuse, Site site) {
  // Without initcheck nothing may depend on the shadows.
  if (!(machine->request.checks & CHECK_INIT)) return;
  const Kind kinds[] = {POISONED_BRANCH, POISONED_ADDRESS, POISONED_OPERAND};
  machine->fail(machine->failure_at(t, kinds[misuse], site));
}
static void service_trap(Thread* t, Site site) {
  machine->fail(machine->failure_at(t, TRAPPED, site));
}
static const Services services = {service_barrier, service_warp,   service_load,
                                  service_store,   service_misuse, service_trap};

Machine::Machine(Request& r)
    : request(r),
      threads(r.block[0] * r.block[1] * r.block[2]),
      warps_count((threads + WARP - 1) / WARP),
      thread(threads),
      fibre(threads),
      wait(threads),
      wait_site(threads),
      warp(warps_count),
      stacks(r.image->synchronises ? threads : 1),
      shared_bytes(r.static_shared + r.dynamic_shared) {
  shared.resize(shared_bytes + 16);
  shared_poison.resize(shared_bytes + 16);
  if (r.checks & CHECK_RACE) shared_cells.resize(shared_bytes);
  cells.resize(r.segment_count);
}

Machine::~Machine() {
  for (uint32_t i = 0; i < request.segment_count; ++i) {
    const Segment& s = request.segments[i];
    if (cells[i]) munmap(cells[i], ((s.high - s.low) / s.granule + 1) * sizeof(Cell));
  }
}

Failure Machine::failure_at(const Thread* t, Kind kind, Site site) const {
  Failure f = {};
  f.kind = kind;
  f.site = site;
  f.thread = t ? t->index : 0;
  f.block = block;
  return f;
}

void Machine::fail(Failure failure) {
  request.failure = failure;
  // The fibre that called is abandoned where it stands; so are all others.
  Fibre lost;
  lost.switch_to(home);
  __builtin_trap();
}

// ---- blocks and threads -------------------------------------------------------------------------

static void run_one(void* argument) {
  Thread* t = static_cast<Thread*>(argument);
  machine->request.image->entry(t);
  machine->finish_thread(*t);
}
static void run_all(void*) {
  Machine& m = *machine;
  for (uint32_t i = 0; i < m.threads; ++i) {
    const uint32_t index = m.request.thread_order ? m.request.thread_order[i] : i;
    m.request.image->entry(&m.thread[index]);
    m.wait[index] = DONE;
  }
  m.live = 0;
  Fibre done;
  done.switch_to(m.home);
}

void Machine::start_thread(uint32_t index) {
  Thread& t = thread[index];
  const uint32_t* b = request.block;
  t.tid[0] = index % b[0];
  t.tid[1] = index / b[0] % b[1];
  t.tid[2] = index / b[0] / b[1];
  memcpy(t.ntid, request.block, sizeof t.ntid);
  memcpy(t.nctaid, request.grid, sizeof t.nctaid);
  t.ctaid[0] = uint32_t(block % request.grid[0]);
  t.ctaid[1] = uint32_t(block / request.grid[0] % request.grid[1]);
  t.ctaid[2] = uint32_t(block / request.grid[0] / request.grid[1]);
  t.lane = index % WARP;
  t.warp = index / WARP;
  t.index = index;
  t.static_shared = request.static_shared;
  t.dynamic_shared = request.dynamic_shared;
  t.shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(shared.data()) + 15) &
                                              ~uintptr_t(15));
  t.params = request.params;
  t.services = &services;
  wait[index] = READY;
}

void Machine::run_block() {
  live = threads;
  arrived = 0;
  for (uint32_t w = 0; w < warps_count; ++w) {
    const uint32_t count = threads - w * WARP < WARP ? threads - w * WARP : WARP;
    warp[w] = Warp();
    warp[w].live = count == WARP ? ~0u : (1u << count) - 1;
  }
  for (uint32_t i = 0; i < threads; ++i) start_thread(i);
  if (!request.image->synchronises) {
    fibre[0].prepare(stacks.at(0), Stacks::size(0), run_all, nullptr);
    home.switch_to(fibre[0]);
    return;
  }
  for (uint32_t i = 0; i < threads; ++i)
    fibre[i].prepare(stacks.at(i), Stacks::size(i), run_one, &thread[i]);
  while (live && !request.failure.kind) {
    bool progress = false;
    for (uint32_t i = 0; i < threads && !request.failure.kind; ++i) {
      const uint32_t index = request.thread_order ? request.thread_order[i] : i;
      if (wait[index] != READY) continue;
      progress = true;
      home.switch_to(fibre[index]);
    }
    if (!progress) report_stuck();
  }
}

void Machine::yield(Thread* t, Wait reason) {
  wait[t->index] = reason;
  fibre[t->index].switch_to(home);
}

void Machine::finish_thread(Thread& t) {
  --live;
  Warp& w = warp[t.warp];
  w.live &= ~(1u << t.lane);
  // Those who wait do not wait for threads that have left.
  if (arrived && arrived == live) release_barrier();
  for (uint32_t lane = 0; lane < WARP; ++lane)
    if (w.waiting >> lane & 1) try_complete(t.warp, *w.requests[lane]);
  yield(&t, DONE);
}

void Machine::barrier(Thread* t, Site site) {
  wait_site[t->index] = site;
  wait[t->index] = AT_BARRIER;
  ++arrived;
  if (arrived == live) release_barrier();
  yield(t, wait[t->index]);  // also the last one, so that the order of the threads holds
}

void Machine::release_barrier() {
  uint32_t first = 0;
  while (wait[first] != AT_BARRIER) ++first;
  for (uint32_t i = first; i < threads; ++i) {
    if (wait[i] != AT_BARRIER || wait_site[i] == wait_site[first]) continue;
    Failure f = failure_at(&thread[i], BARRIER_DIVERGED, wait_site[i]);
    f.other_thread = first;
    f.other_site = wait_site[first];
    f.expected = live;
    for (uint32_t k = 0; k < threads; ++k)
      f.arrived += wait[k] == AT_BARRIER && wait_site[k] == wait_site[i];
    fail(f);
  }
  for (uint32_t i = first; i < threads; ++i)
    if (wait[i] == AT_BARRIER) wait[i] = READY;
  arrived = 0;
  block_since = ++clock;
}

// Nobody can run. All live threads at barriers would have been released, so somebody waits for
// lanes of his warp that never come.
void Machine::report_stuck() {
  for (uint32_t i = 0; i < threads; ++i) {
    if (wait[i] != AT_WARP) continue;
    Warp& w = warp[i / WARP];
    const WarpRequest& r = *w.requests[i % WARP];
    Failure f = failure_at(&thread[i], WARP_STUCK, r.site);
    f.mask = r.mask;
    f.expected = __builtin_popcount(r.mask & w.live);
    for (uint32_t lane = 0; lane < WARP; ++lane)
      f.arrived += (w.waiting >> lane & 1) && w.requests[lane]->mask == r.mask;
    f.elsewhere = arrived;
    request.failure = f;
    return;
  }
}

// ---- warp operations ------------------------------------------------------------------------------

void Machine::warp_operation(Thread* t, WarpRequest* r) {
  Warp& w = warp[t->warp];
  if (!(r->mask >> t->lane & 1)) {
    Failure f = failure_at(t, WARP_NOT_MEMBER, r->site);
    f.mask = r->mask;
    fail(f);
  }
  w.requests[t->lane] = r;
  w.waiting |= 1u << t->lane;
  wait[t->index] = AT_WARP;
  if (!try_complete(t->warp, *r)) yield(t, AT_WARP);
}

static void shuffle(const WarpRequest* const* in, WarpRequest* out, uint32_t members, int lane) {
  const WarpRequest& r = *in[lane];
  const int segment = r.c >> 8 & 31, clamp = r.c & 31, b = r.b & 31;
  const int first = lane & segment, last = first | (clamp & ~segment);
  int source = 0;
  bool valid = false;
  switch (r.operation) {
    case SHUFFLE_UP: source = lane - b, valid = source >= last; break;
    case SHUFFLE_DOWN: source = lane + b, valid = source <= last; break;
    case SHUFFLE_BFLY: source = lane ^ b, valid = source <= last; break;
    default: source = first | (b & ~segment), valid = source <= last; break;
  }
  if (!valid) source = lane;
  out->predicate = valid;
  if (members >> source & 1) {
    out->a = in[source]->a;
    out->poison = in[source]->poison;
  } else {  // "unpredictable" when the source lane takes no part
    out->a = 0xdeadbeef;
    out->poison = ~0u;
  }
}

static void vote(const WarpRequest* const* in, WarpRequest* out, uint32_t members) {
  uint32_t ballot = 0, poison = 0;
  for (uint32_t lane = 0; lane < WARP; ++lane) {
    if (!(members >> lane & 1)) continue;
    ballot |= (in[lane]->a & 1) << lane;
    poison |= (in[lane]->poison & 1) << lane;
  }
  out->a = ballot;
  out->poison = poison;
  out->predicate = out->operation == VOTE_ALL   ? ballot == members
                   : out->operation == VOTE_ANY ? ballot != 0
                                                : ballot == 0 || ballot == members;
}

// Completes the operation if every live lane of its mask waits at one with the same mask.
bool Machine::try_complete(uint32_t index, const WarpRequest& arrival) {
  Warp& w = warp[index];
  const uint32_t members = arrival.mask & w.live;
  if (members & ~w.waiting) return false;
  WarpRequest before[WARP];
  const WarpRequest* in[WARP] = {};
  for (uint32_t lane = 0; lane < WARP; ++lane) {
    if (!(members >> lane & 1)) continue;
    if (w.requests[lane]->mask != arrival.mask) return false;
    before[lane] = *w.requests[lane];
    in[lane] = &before[lane];
  }
  for (uint32_t lane = 0; lane < WARP; ++lane) {
    if (!(members >> lane & 1)) continue;
    WarpRequest* out = w.requests[lane];
    if (out->operation != arrival.operation) {
      Failure f = failure_at(&thread[index * WARP + lane], WARP_MISMATCH, out->site);
      f.other_site = arrival.site;
      fail(f);
    }
    if (out->operation >= VOTE_BALLOT) vote(in, out, members);
    else if (out->operation != WARP_SYNC) shuffle(in, out, members, lane);
    wait[index * WARP + lane] = READY;
  }
  w.waiting &= ~members;
  if (members == w.live) w.since = ++clock;  // orders the whole warp
  return true;
}

// ---- launch ---------------------------------------------------------------------------------------

void Machine::run() {
  if (!stacks.ok()) {
    request.failure.kind = NO_MEMORY;
    return;
  }
  const uint64_t blocks = uint64_t(request.grid[0]) * request.grid[1] * request.grid[2];
  for (uint64_t i = 0; i < blocks && !request.failure.kind; ++i) {
    block = request.block_order ? request.block_order[i] : i;
    block_start = block_since = ++clock;
    if (request.checks & CHECK_RACE) {
      block_starts.push_back(block_start);
      block_ids.push_back(block);
    }
    // What the last block left in shared memory is gone.
    memset(shared.data(), 0xa5, shared.size());
    if (request.checks) memset(shared_poison.data(), 0xff, shared_poison.size());
    run_block();
    if (request.failure.kind) break;
    if (request.checks & CHECK_TRAFFIC) count_traffic(), count_banks();
  }
  for (const Thread& t : thread) request.instructions += t.instructions;
}

extern "C" __attribute__((visibility("default"))) void ptx_run(Request* request) {
  Machine m(*request);
  machine = &m;
  m.run();
  machine = nullptr;
}
