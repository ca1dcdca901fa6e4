// memcheck, initcheck and racecheck: what the runtime knows of every access in checked mode.

#include <algorithm>

#include "machine.h"

#include <string.h>

constexpr uint16_t NOBODY = 0xffff;  // the thread is not known any more
constexpr unsigned char SLACK_PATTERN = 0xa5;  // stands for neighbours that must not matter

const Segment* Machine::find(uint64_t address) const {
  const Segment* end = request.segments + request.segment_count;
  const Segment* s = std::upper_bound(request.segments, end, address,
                                      [](uint64_t a, const Segment& x) { return a < x.low; });
  if (s == request.segments) return nullptr;
  --s;
  return address < s->high ? s : nullptr;
}

static Failure at_address(Failure f, uint64_t address, uint32_t bytes, bool write, bool shared) {
  f.address = address;
  f.bytes = bytes;
  f.write = write;
  f.shared = shared;
  return f;
}

uint64_t Machine::shared_offset(Thread* t, uint64_t address, uint32_t bytes, Site site,
                                bool write) {
  if (address + bytes > shared_bytes || address + bytes < address)
    fail(at_address(failure_at(t, SHARED_BOUNDS, site), address, bytes, write, true));
  if (address % bytes)
    fail(at_address(failure_at(t, MISALIGNED, site), address, bytes, write, true));
  return address;
}

static bool in_shared(Space space, uint64_t address) {
  return space == SHARED || (space == GENERIC && address >= SHARED_WINDOW);
}
static uint64_t unwindowed(Space space, uint64_t address) {
  return space == SHARED ? address : address - SHARED_WINDOW;
}

void Machine::load(Thread* t, Space space, uint64_t address, uint32_t bytes, Site site,
                   unsigned char* value, unsigned char* poison) {
  const bool init = request.checks & CHECK_INIT;
  memset(poison, 0, bytes);
  if (in_shared(space, address)) {
    const uint64_t offset = shared_offset(t, unwindowed(space, address), bytes, site, false);
    memcpy(value, t->shared + offset, bytes);
    if (init) memcpy(poison, shared_poison.data() + offset, bytes);
    if (request.checks & CHECK_RACE)
      check_race(t, shared_cells.data(), offset, offset + bytes - 1, offset, site, false, true);
    if (request.checks & CHECK_TRAFFIC) log_shared(t, offset, bytes, site);
    return;
  }
  const Segment* s = find(address);
  if (!s || address + bytes > s->high)
    fail(at_address(failure_at(t, OUT_OF_BOUNDS, site), address, bytes, false, false));
  if (address % bytes)
    fail(at_address(failure_at(t, MISALIGNED, site), address, bytes, false, false));
  const uint64_t offset = address - s->low;
  const uint8_t* state = s->state + offset;
  bool writable = false;
  for (uint32_t i = 0; i < bytes; ++i) {
    if (state[i] & LIVE) {
      value[i] = s->host[offset + i];
      if (init && (state[i] & POISON)) poison[i] = 0xff;
      writable |= (state[i] & WRITABLE) != 0;
    } else if (state[i] & SLACK) {
      value[i] = SLACK_PATTERN;
      if (init) poison[i] = 0xff;
    } else {
      fail(at_address(failure_at(t, OUT_OF_BOUNDS, site), address, bytes, false, false));
    }
  }
  if ((request.checks & CHECK_RACE) && writable)
    check_race(t, cells_of(t, s, site), offset / s->granule, (offset + bytes - 1) / s->granule,
               address, site, false, false);
  if ((request.checks & CHECK_TRAFFIC) && space != CONSTANT)
    log_global(t, address, bytes, site, false, s->owner[offset]);
}

void Machine::store(Thread* t, Space space, uint64_t address, uint32_t bytes, Site site,
                    const unsigned char* value, const unsigned char* poison) {
  const bool init = request.checks & CHECK_INIT;
  if (in_shared(space, address)) {
    const uint64_t offset = shared_offset(t, unwindowed(space, address), bytes, site, true);
    memcpy(t->shared + offset, value, bytes);
    if (init) memcpy(shared_poison.data() + offset, poison, bytes);
    if (request.checks & CHECK_RACE)
      check_race(t, shared_cells.data(), offset, offset + bytes - 1, offset, site, true, true);
    if (request.checks & CHECK_TRAFFIC) log_shared(t, offset, bytes, site);
    return;
  }
  const Segment* s = find(address);
  if (!s || address + bytes > s->high)
    fail(at_address(failure_at(t, OUT_OF_BOUNDS, site), address, bytes, true, false));
  if (address % bytes)
    fail(at_address(failure_at(t, MISALIGNED, site), address, bytes, true, false));
  const uint64_t offset = address - s->low;
  uint8_t* state = s->state + offset;
  for (uint32_t i = 0; i < bytes; ++i) {
    if (!(state[i] & LIVE))
      fail(at_address(failure_at(t, OUT_OF_BOUNDS, site), address, bytes, true, false));
    if (!(state[i] & WRITABLE))
      fail(at_address(failure_at(t, READ_ONLY, site), address, bytes, true, false));
    if (init && poison[i])
      fail(at_address(failure_at(t, POISON_STORED, site), address, bytes, true, false));
  }
  for (uint32_t i = 0; i < bytes; ++i) state[i] = (state[i] & ~POISON) | WRITTEN;
  memcpy(s->host + offset, value, bytes);
  if (request.checks & CHECK_RACE)
    check_race(t, cells_of(t, s, site), offset / s->granule, (offset + bytes - 1) / s->granule,
               address, site, true, false);
  if (request.checks & CHECK_TRAFFIC) log_global(t, address, bytes, site, true, s->owner[offset]);
}

// ---- races ----------------------------------------------------------------------------------------

// The records of a segment, mapped when first needed; pages that are never touched cost nothing.
Cell* Machine::cells_of(Thread* t, const Segment* s, Site site) {
  Cell*& c = cells[s - request.segments];
  if (!c) {
    void* p = mmap(nullptr, ((s->high - s->low) / s->granule + 1) * sizeof(Cell),
                   PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail(failure_at(t, NO_MEMORY, site));
    c = static_cast<Cell*>(p);
  }
  return c;
}

uint64_t Machine::block_at(uint32_t time) const {
  const auto it = std::upper_bound(block_starts.begin(), block_starts.end(), time);
  return it == block_starts.begin() ? 0 : block_ids[it - block_starts.begin() - 1];
}

void Machine::race(Thread* t, uint32_t time, uint16_t other, uint64_t address, Site site,
                   bool write, bool shared) {
  const Kind kind = time < block_start ? RACE_BETWEEN_BLOCKS : RACE_IN_BLOCK;
  Failure f = at_address(failure_at(t, kind, site), address, 0, write, shared);
  f.other_thread = other;
  f.other_block = block_at(time);
  fail(f);
}

void Machine::check_race(Thread* t, Cell* cells_, uint64_t first, uint64_t last, uint64_t address,
                         Site site, bool write, bool shared) {
  const uint32_t warp_since = std::max(warp[t->warp].since, block_since);
  // An earlier access is ordered before this one if a barrier, or for the own warp a warp
  // synchronisation, lies between.
  const auto concurrent = [&](uint32_t time, uint16_t other) {
    if (time == 0 || other == t->index) return false;
    return time >= (other / WARP == t->warp ? warp_since : block_since);
  };
  for (uint64_t i = first; i <= last; ++i) {
    Cell& c = cells_[i];
    const bool old_write = c.write_time && c.write_time < block_start;
    if ((old_write && !shared) || (!old_write && concurrent(c.write_time, c.write_thread)))
      race(t, c.write_time, c.write_thread, address, site, write, shared);
    for (int k = 0; k < 2 && !shared; ++k)
      if (c.read_time[k] && c.read_time[k] < block_start) c.foreign_read = c.read_time[k];
    if (write) {
      if (c.foreign_read) race(t, c.foreign_read, NOBODY, address, site, true, false);
      for (int k = 0; k < 2; ++k) {
        const uint16_t reader = c.read_thread[k];
        const bool now = c.read_time[k] >= (reader / WARP == t->warp ? warp_since : block_since);
        if (c.read_time[k] && now && (c.several[k] || reader != t->index))
          race(t, c.read_time[k], reader, address, site, true, shared);
      }
      c.write_time = clock;
      c.write_thread = uint16_t(t->index);
      continue;
    }
    // Keep one record for each of two warps that read in this interval.
    int k = 0;
    for (; k < 2; ++k)
      if (c.read_time[k] < block_since || c.read_thread[k] / WARP == t->warp) break;
    if (k == 2) continue;
    const bool same = c.read_time[k] >= warp_since && c.read_thread[k] / WARP == t->warp;
    c.several[k] = same && (c.several[k] || c.read_thread[k] != t->index);
    c.read_time[k] = clock;
    c.read_thread[k] = uint16_t(t->index);
  }
}
