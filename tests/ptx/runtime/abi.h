// What a translated kernel and the runtime know of each other.

#pragma once
#include <stdint.h>

// Generic addresses of shared memory: a window no host allocation can lie in.
constexpr uint64_t SHARED_WINDOW = 0xffff000000000000ull;
constexpr int WARP = 32;

// The site of an instruction is its line in the PTX text; 0 means none.
using Site = uint32_t;

struct Thread;

enum WarpOperation : uint32_t { WARP_SYNC, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_BFLY, SHUFFLE_IDX,
                                VOTE_BALLOT, VOTE_ALL, VOTE_ANY, VOTE_UNI };

// One lane's part in an operation of its warp, and what it gets back.
struct WarpRequest {
  WarpOperation operation;
  uint32_t mask;
  uint32_t a, b, c;
  uint32_t poison;  // of a
  Site site;
  bool predicate;   // result beside the value
};

enum Space : uint32_t { GLOBAL, SHARED, GENERIC, CONSTANT };
enum Misuse : uint32_t { POISON_BRANCH, POISON_ADDRESS, POISON_OPERAND };

// The runtime's services, reached through a table so that a kernel links against nothing.
struct Services {
  void (*barrier)(Thread*, Site);
  void (*warp)(Thread*, WarpRequest*);
  // Checked mode only; sizes in bytes, values and poison as byte arrays.
  void (*load)(Thread*, Space, uint64_t address, uint32_t bytes, Site, void* value, void* poison);
  void (*store)(Thread*, Space, uint64_t address, uint32_t bytes, Site, const void* value,
                const void* poison);
  void (*misuse)(Thread*, Misuse, Site);
  void (*trap)(Thread*, Site);
};

struct Thread {
  uint32_t tid[3], ntid[3], ctaid[3], nctaid[3];
  uint32_t lane, warp, index;
  uint32_t static_shared, dynamic_shared;
  unsigned char* shared;
  const unsigned char* params;
  const Services* services;
  uint64_t instructions;  // executed PTX instructions, counted in checked mode
};

// A module-scope table inside the kernel's image; the executor registers it as read-only memory.
struct Variable {
  const char* name;
  const void* address;
  uint64_t bytes;
};

struct KernelImage {
  void (*entry)(Thread*);
  uint32_t synchronises;  // 0: no barrier and no warp operation, threads may run one by one
  uint32_t variable_count;
  const Variable* variables;
};
