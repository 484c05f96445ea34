#include "collectives.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>

namespace npu_sim {
namespace {

/// Chunk `round` of a piece; empty after its end.
Piece chunk(const Piece& piece, uint64_t round, size_t bytes) {
  const size_t begin = std::min(piece.size, round * bytes);
  return {piece.data + begin, std::min(piece.size - begin, bytes)};
}

void copy(void* to, const void* from, size_t size) {
  if (size > 0) std::memcpy(to, from, size);
}

uint64_t rounds_for(const std::vector<Piece>& pieces, size_t bytes) {
  size_t largest = 0;
  for (const Piece& piece : pieces) largest = std::max(largest, piece.size);
  return (largest + bytes - 1) / bytes;
}

/// The part of a slot that is meant for one rank; a multiple of every element's size.
size_t part_bytes(const SharedRegion& region) { return SharedRegion::kSlotBytes / region.ranks / 64 * 64; }

/// Agree on the call, then alternate `put` and `take` until the last rank needs no more rounds.
Failure in_rounds(SharedRegion& region, const std::string& text, uint64_t rounds,
                  const std::function<void(uint64_t)>& put, const std::function<void(uint64_t)>& take) {
  Call call{};
  std::snprintf(call.text, sizeof call.text, "%s", text.c_str());
  call.rounds = rounds;
  if (Failure failure = region.agree(call, &rounds)) return failure;
  for (uint64_t round = 0; round < rounds; ++round) {
    put(round);
    if (Failure failure = region.barrier()) return failure;
    take(round);
    if (Failure failure = region.barrier()) return failure;
  }
  return {};
}

/// `into` = the reduction of chunks at `from(rank)`.
void reduce_chunks(const SharedRegion& region, Piece into, HcclDataType type, HcclReduceOp op,
                   const std::function<const char*(uint32_t)>& from) {
  copy(into.data, from(0), into.size);
  for (uint32_t rank = 1; rank < region.ranks; ++rank) {
    reduce(into.data, from(rank), into.size / size_of(type), type, op);
  }
}

}  // namespace

Failure share(SharedRegion& region, const std::string& call, Piece mine, const std::vector<Piece>& into) {
  const size_t bytes = SharedRegion::kSlotBytes;
  const auto put = [&](uint64_t round) {
    const Piece part = chunk(mine, round, bytes);
    copy(region.slot(region.rank), part.data, part.size);
  };
  const auto take = [&](uint64_t round) {
    for (uint32_t rank = 0; rank < region.ranks; ++rank) {
      const Piece part = chunk(into[rank], round, bytes);
      copy(part.data, region.slot(rank), part.size);
    }
  };
  return in_rounds(region, call, rounds_for({mine}, bytes), put, take);
}

Failure deal(SharedRegion& region, const std::string& call, const std::vector<Piece>& out,
             const std::vector<Piece>& in) {
  const size_t bytes = part_bytes(region);
  const auto put = [&](uint64_t round) {
    for (uint32_t rank = 0; rank < region.ranks; ++rank) {
      const Piece part = chunk(out[rank], round, bytes);
      copy(region.slot(region.rank) + rank * bytes, part.data, part.size);
    }
  };
  const auto take = [&](uint64_t round) {
    for (uint32_t rank = 0; rank < region.ranks; ++rank) {
      const Piece part = chunk(in[rank], round, bytes);
      copy(part.data, region.slot(rank) + region.rank * bytes, part.size);
    }
  };
  return in_rounds(region, call, rounds_for(out, bytes), put, take);
}

Failure combine(SharedRegion& region, const std::string& call, Piece mine, Piece into, HcclDataType type,
                HcclReduceOp op) {
  const size_t bytes = SharedRegion::kSlotBytes;
  const auto put = [&](uint64_t round) {
    const Piece part = chunk(mine, round, bytes);
    copy(region.slot(region.rank), part.data, part.size);
  };
  const auto take = [&](uint64_t round) {
    reduce_chunks(region, chunk(into, round, bytes), type, op, [&](uint32_t rank) { return region.slot(rank); });
  };
  return in_rounds(region, call, rounds_for({mine}, bytes), put, take);
}

Failure combine_parts(SharedRegion& region, const std::string& call, const std::vector<Piece>& out, Piece into,
                      HcclDataType type, HcclReduceOp op) {
  const size_t bytes = part_bytes(region);
  const auto put = [&](uint64_t round) {
    for (uint32_t rank = 0; rank < region.ranks; ++rank) {
      const Piece part = chunk(out[rank], round, bytes);
      copy(region.slot(region.rank) + rank * bytes, part.data, part.size);
    }
  };
  const auto take = [&](uint64_t round) {
    reduce_chunks(region, chunk(into, round, bytes), type, op,
                  [&](uint32_t rank) { return region.slot(rank) + region.rank * bytes; });
  };
  return in_rounds(region, call, rounds_for(out, bytes), put, take);
}

Failure meet(SharedRegion& region, const std::string& call) {
  return in_rounds(region, call, 0, [](uint64_t) {}, [](uint64_t) {});
}

}  // namespace npu_sim
