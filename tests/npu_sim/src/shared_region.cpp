#include "shared_region.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "gil.h"
#include "options.h"

namespace npu_sim {

/// What the others may know of a rank. All zero when the region is new.
struct alignas(64) SharedRegion::Member {
  std::atomic<uint64_t> met;
  std::atomic<int32_t> pid;
  std::atomic<bool> gave_up;
  char reason[512];
  Call calls[2];  // by parity: nobody can be two calls ahead, since each call has a barrier
};

namespace {

/// Whether the process is gone, or only awaits being reaped by its parent.
bool dead(int32_t pid) {
  if (pid == 0) return false;  // hasn't opened the region yet
  std::FILE* stat = std::fopen(format("/proc/%d/stat", pid).c_str(), "r");
  if (stat == nullptr) return true;
  char state = 0;
  const int read = std::fscanf(stat, "%*d (%*[^)]) %c", &state);
  std::fclose(stat);
  return read == 1 && (state == 'Z' || state == 'X');
}

}  // namespace

std::shared_ptr<SharedRegion> SharedRegion::open(const std::string& name, uint32_t ranks, uint32_t rank,
                                                 Failure* failure) {
  const size_t boxes = sizeof(Box) * ranks * ranks;
  const size_t size = (sizeof(Member) + kSlotBytes) * ranks + boxes;  // pages that nobody touches cost nothing
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  void* memory = MAP_FAILED;
  if (file >= 0) {
    if (ftruncate(file, static_cast<off_t>(size)) == 0) {
      memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
  }
  if (memory == MAP_FAILED) {
    *failure = {ACL_ERROR_RT_INTERNAL_ERROR, format("no shared memory of %zu bytes: %s", size, std::strerror(errno))};
    return nullptr;
  }
  std::shared_ptr<SharedRegion> region(new SharedRegion(ranks, rank, memory, size));
  region->member(rank).pid = getpid();
  *failure = region->barrier();
  if (rank == 0) shm_unlink(name.c_str());  // all have it, or it is of no use
  return *failure ? nullptr : region;
}

SharedRegion::SharedRegion(uint32_t ranks, uint32_t rank, void* memory, size_t size)
    : ranks(ranks), rank(rank), memory_(memory), size_(size) {}

SharedRegion::~SharedRegion() { munmap(memory_, size_); }

SharedRegion::Member& SharedRegion::member(uint32_t of_rank) { return static_cast<Member*>(memory_)[of_rank]; }

char* SharedRegion::slot(uint32_t of_rank) {
  return static_cast<char*>(memory_) + sizeof(Member) * ranks + kSlotBytes * of_rank;
}

Box& SharedRegion::box(uint32_t from, uint32_t to) { return reinterpret_cast<Box*>(slot(ranks))[from * ranks + to]; }

Failure SharedRegion::barrier() {
  const uint64_t goal = ++met_;
  member(rank).met.store(goal, std::memory_order_release);
  return wait_until([this, goal](uint32_t peer) { return member(peer).met.load(std::memory_order_acquire) >= goal; });
}

Failure SharedRegion::agree(const Call& mine, uint64_t* rounds) {
  const size_t side = ++calls_ % 2;
  member(rank).calls[side] = mine;
  if (Failure failure = barrier()) return failure;
  *rounds = 0;
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    const Call& other = member(peer).calls[side];
    if (std::strncmp(other.text, mine.text, sizeof mine.text) != 0) {
      return {ACL_ERROR_RT_INTERNAL_ERROR,
              format("the ranks of a communicator call different collectives: rank %u %s, rank %u %s", rank, mine.text,
                     peer, other.text)};
    }
    *rounds = std::max(*rounds, other.rounds);
  }
  return {};
}

Failure SharedRegion::await(const std::function<bool(uint32_t)>& involved, const std::function<bool()>& ready) {
  return wait_until([&](uint32_t peer) { return !involved(peer) || ready(); });
}

void SharedRegion::give_up(const Failure& why) {
  Member& own = member(rank);
  if (own.gave_up) return;
  std::snprintf(own.reason, sizeof own.reason, "%s", why.text.c_str());
  own.gave_up.store(true, std::memory_order_release);
}

/// Wait until `met(peer)` holds for every peer.
Failure SharedRegion::wait_until(const std::function<bool(uint32_t)>& met) {
  const auto all_met = [&] {
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (!met(peer)) return false;
    }
    return true;
  };
  const GilRelease released;
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto limit = begin + std::chrono::duration<double>(options().timeout_s);
  auto check_peers = begin + std::chrono::milliseconds(50);
  for (uint64_t tries = 0; !all_met(); ++tries) {
    if (tries < 100) {  // most peers are near; there may be fewer cores than ranks
      sched_yield();
      continue;
    }
    usleep(50);
    const auto now = Clock::now();
    if (now < check_peers) continue;
    check_peers = now + std::chrono::milliseconds(50);
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer == rank || met(peer)) continue;
      if (member(peer).gave_up.load(std::memory_order_acquire)) {
        return {ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, format("rank %u gave up: %s", peer, member(peer).reason)};
      }
      if (dead(member(peer).pid)) {
        return {ACL_ERROR_RT_SUSPECT_REMOTE_ERROR,
                format("rank %u (process %d) has died", peer, member(peer).pid.load())};
      }
    }
    if (now >= limit) {
      return {ACL_ERROR_RT_FFTS_PLUS_TIMEOUT,
              format("rank %u waited %g s (NPU_SIM_TIMEOUT_S) for%s", rank, options().timeout_s, missing(met).c_str())};
    }
  }
  return {};
}

std::string SharedRegion::missing(const std::function<bool(uint32_t)>& met) {
  std::string list = " ranks";
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    if (!met(peer)) list += format(" %u", peer);
  }
  return list;
}

}  // namespace npu_sim
