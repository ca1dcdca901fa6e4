// One launch: its configuration, its state while it runs, and what it reports.

#pragma once
#include <vector>

#include "abi.h"
#include "fibre.h"

// State of a byte of registered memory (mirrored in memory.py).
enum State : uint8_t { LIVE = 1, WRITABLE = 2, POISON = 4, SLACK = 8, WRITTEN = 16 };

enum Check : uint32_t { CHECK_INIT = 1, CHECK_RACE = 2, CHECK_TRAFFIC = 4 };

// Why a launch stopped (mirrored in executor.py).
enum Kind : uint32_t {
  FINE, OUT_OF_BOUNDS, MISALIGNED, READ_ONLY, SHARED_BOUNDS, POISON_STORED, POISONED_BRANCH,
  POISONED_ADDRESS, POISONED_OPERAND, RACE_IN_BLOCK, RACE_BETWEEN_BLOCKS,
  BARRIER_DIVERGED, WARP_STUCK, WARP_MISMATCH, WARP_NOT_MEMBER, TRAPPED, NO_MEMORY,
};

struct Failure {
  uint32_t kind, site, thread, other_thread, other_site, write, bytes, shared;
  uint64_t block, other_block, address;
  uint32_t arrived, expected, elsewhere, mask;
};

// A run of registered addresses with the memory behind it. Virtual and host addresses are the
// same unless the caller placed the memory elsewhere (sparse memory).
struct Segment {
  uint64_t low, high;
  unsigned char* host;
  uint8_t* state;    // one State per byte
  uint16_t* owner;   // buffer of each byte
  uint64_t granule;  // bytes per race record
};

struct Counters {
  uint64_t read_requests, write_requests;    // sectors, distinct within one warp instruction
  uint64_t read_sectors, write_sectors;      // sectors, distinct within one block
};

struct Request {
  const KernelImage* image;
  uint32_t grid[3], block[3];
  uint32_t static_shared, dynamic_shared;
  const unsigned char* params;
  const uint64_t* block_order;   // null: ascending
  const uint32_t* thread_order;  // null: ascending
  uint32_t checks, segment_count;
  const Segment* segments;
  Counters* counters;            // one per buffer
  uint64_t buffer_count;
  // Results.
  uint64_t instructions, shared_requests, shared_wavefronts, shared_minimum;
  Failure failure;
};

// The last accesses to one granule of memory, as stamps of the launch's clock. Two readers of
// different warps are enough: whoever writes next is of another warp than one of them.
struct Cell {
  uint32_t write_time, read_time[2];
  uint32_t foreign_read;  // a read by an earlier block
  uint16_t write_thread, read_thread[2];
  bool several[2];  // more than one lane of the reader's warp has read
};

struct Access {
  uint64_t key, place;
};

enum Wait : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };

struct Warp {
  uint32_t live = 0, waiting = 0, since = 0;
  WarpRequest* requests[WARP] = {};
};

struct Machine {
  explicit Machine(Request& request);
  ~Machine();
  void run();

  // Stops the launch; never returns.
  [[noreturn]] void fail(Failure failure);
  Failure failure_at(const Thread* t, Kind kind, Site site) const;

  // Scheduling (runtime.cpp).
  void run_block();
  void start_thread(uint32_t index);
  void finish_thread(Thread& t);
  void barrier(Thread* t, Site site);
  void release_barrier();
  void warp_operation(Thread* t, WarpRequest* request);
  bool try_complete(uint32_t warp, const WarpRequest& request);
  void yield(Thread* t, Wait wait);
  void report_stuck();

  // Memory (checks.cpp).
  const Segment* find(uint64_t address) const;
  void load(Thread* t, Space space, uint64_t address, uint32_t bytes, Site site,
            unsigned char* value, unsigned char* poison);
  void store(Thread* t, Space space, uint64_t address, uint32_t bytes, Site site,
             const unsigned char* value, const unsigned char* poison);
  uint64_t shared_offset(Thread* t, uint64_t address, uint32_t bytes, Site site, bool write);
  Cell* cells_of(Thread* t, const Segment* s, Site site);
  void check_race(Thread* t, Cell* cells, uint64_t first, uint64_t last, uint64_t address,
                  Site site, bool write, bool shared);
  void race(Thread* t, uint32_t time, uint16_t thread, uint64_t address, Site site, bool write,
            bool shared);
  uint64_t block_at(uint32_t time) const;

  // Traffic (traffic.cpp).
  void log_global(Thread* t, uint64_t address, uint32_t bytes, Site site, bool write,
                  uint16_t buffer);
  void log_shared(Thread* t, uint64_t offset, uint32_t bytes, Site site);
  uint64_t next_occurrence(Thread* t, Site site);
  void count_traffic();
  void count_banks();

  Request& request;
  uint32_t threads, warps_count;
  std::vector<Thread> thread;
  std::vector<Fibre> fibre;
  std::vector<Wait> wait;
  std::vector<Site> wait_site;
  std::vector<Warp> warp;
  Fibre home;
  Stacks stacks;
  uint32_t live = 0, arrived = 0;
  uint64_t block = 0;
  std::vector<unsigned char> shared, shared_poison;
  uint32_t shared_bytes;

  // Racecheck: a clock that advances at every synchronisation.
  uint32_t clock = 1, block_start = 1, block_since = 1;
  std::vector<uint32_t> block_starts;
  std::vector<uint64_t> block_ids;
  std::vector<Cell*> cells;  // per segment
  std::vector<Cell> shared_cells;

  // Traffic: the accesses of the running block.
  std::vector<Access> global_log, shared_log;
  std::vector<int> site_index;
  std::vector<std::vector<uint32_t>> occurrences;
};

extern Machine* machine;  // the running launch
