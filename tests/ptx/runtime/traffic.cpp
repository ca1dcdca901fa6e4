// The traffic counter: 32-byte sectors of global memory and wavefronts of shared memory.
//
// Threads of a warp run one after another here, so the lanes of one warp instruction are found
// again by (warp, instruction, how often this thread has executed it). With uniform control flow
// that is exactly the warp instruction of a GPU.

#include <algorithm>

#include "machine.h"

#include <string.h>

constexpr uint64_t SECTOR = 32;

// The bits of an access key, from the top: warp 5, instruction 14, occurrence 30, write 1,
// buffer 14.
constexpr int BUFFER_BITS = 14, OCCURRENCE_BITS = 30, SITE_BITS = 14;

uint64_t Machine::next_occurrence(Thread* t, Site site) {
  if (site >= site_index.size()) site_index.resize(site + 1, -1);
  int& index = site_index[site];
  if (index < 0) {
    index = int(occurrences.size());
    occurrences.emplace_back(threads, 0);
  }
  const uint64_t occurrence = occurrences[index][t->index]++;
  return (uint64_t(t->warp) << SITE_BITS | uint64_t(index)) << OCCURRENCE_BITS | occurrence;
}

void Machine::log_global(Thread* t, uint64_t address, uint32_t bytes, Site site, bool write,
                         uint16_t buffer) {
  const uint64_t key = (next_occurrence(t, site) << 1 | write) << BUFFER_BITS | buffer;
  for (uint64_t s = address / SECTOR; s <= (address + bytes - 1) / SECTOR; ++s)
    global_log.push_back({key, s});
}

void Machine::log_shared(Thread* t, uint64_t offset, uint32_t bytes, Site site) {
  const uint64_t key = next_occurrence(t, site);
  shared_log.push_back({key, offset << 16 | uint64_t(bytes) << 8 | t->lane});
}

static bool before(const Access& a, const Access& b) {
  return a.key != b.key ? a.key < b.key : a.place < b.place;
}
static bool equal(const Access& a, const Access& b) { return a.key == b.key && a.place == b.place; }

void Machine::count_traffic() {
  auto& log = global_log;
  constexpr uint64_t last = (2u << BUFFER_BITS) - 1;
  std::sort(log.begin(), log.end(), before);
  log.erase(std::unique(log.begin(), log.end(), equal), log.end());
  for (Access& a : log) {
    a.key &= last;
    Counters& c = request.counters[a.key & (last >> 1)];
    ++(a.key >> BUFFER_BITS ? c.write_requests : c.read_requests);
  }
  // Within a block a repeated sector is found in the first-level cache.
  std::sort(log.begin(), log.end(), before);
  log.erase(std::unique(log.begin(), log.end(), equal), log.end());
  for (const Access& a : log) {
    Counters& c = request.counters[a.key & (last >> 1)];
    ++(a.key >> BUFFER_BITS ? c.write_sectors : c.read_sectors);
  }
  log.clear();
  for (auto& counts : occurrences) std::fill(counts.begin(), counts.end(), 0);
}

// A warp's access takes one wavefront per 128 bytes of width, more if lanes need different words
// of one bank. 8-byte accesses go by half warps, 16-byte accesses by quarters.
void Machine::count_banks() {
  auto& log = shared_log;
  std::sort(log.begin(), log.end(), before);
  for (size_t i = 0; i < log.size();) {
    size_t end = i;
    while (end < log.size() && log[end].key == log[i].key) ++end;
    ++request.shared_requests;
    for (uint32_t phase = 0; phase < 4; ++phase) {
      std::vector<uint64_t> words;
      for (size_t k = i; k < end; ++k) {
        const uint32_t lane = log[k].place & 0xff, bytes = log[k].place >> 8 & 0xff;
        const uint32_t lanes = bytes <= 4 ? WARP : WARP * 4 / bytes;
        if (lane / lanes != phase) continue;
        const uint64_t offset = log[k].place >> 16;
        for (uint64_t w = offset / 4; w <= (offset + bytes - 1) / 4; ++w) words.push_back(w);
      }
      if (words.empty()) continue;
      std::sort(words.begin(), words.end());
      words.erase(std::unique(words.begin(), words.end()), words.end());
      uint32_t bank[32] = {}, most = 0;
      for (const uint64_t w : words) most = std::max(most, ++bank[w % 32]);
      request.shared_wavefronts += most;
      ++request.shared_minimum;
    }
    i = end;
  }
  log.clear();
}
