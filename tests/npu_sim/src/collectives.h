// How data moves between the ranks: four patterns, of which all collectives are made. In each, a rank puts a chunk into
// its slot of the shared region, all meet, each takes what it needs from all slots, and all meet again.
#pragma once

#include <vector>

#include "element.h"
#include "shared_region.h"

namespace npu_sim {

/// A piece of a buffer. The data may be null if the size is 0.
struct Piece {
  char* data = nullptr;
  size_t size = 0;
};

/// Everybody's piece goes to everybody: `into[r]` becomes rank r's `mine`. (all-gather, broadcast)
Failure share(SharedRegion& region, const std::string& call, Piece mine, const std::vector<Piece>& into);

/// A piece for each rank: `in[r]` becomes rank r's `out[this rank]`. (all-to-all, scatter)
Failure deal(SharedRegion& region, const std::string& call, const std::vector<Piece>& out,
             const std::vector<Piece>& in);

/// `into` becomes the reduction, in rank order, of everybody's `mine`; an empty `into` takes nothing. (all-reduce,
/// reduce)
Failure combine(SharedRegion& region, const std::string& call, Piece mine, Piece into, HcclDataType type,
                HcclReduceOp op);

/// `into` becomes the reduction, in rank order, of everybody's `out[this rank]`. (reduce-scatter)
Failure combine_parts(SharedRegion& region, const std::string& call, const std::vector<Piece>& out, Piece into,
                      HcclDataType type, HcclReduceOp op);

/// Everybody has come here.
Failure meet(SharedRegion& region, const std::string& call);

}  // namespace npu_sim
