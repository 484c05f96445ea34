// HCCL: the collectives. Each checks its arguments, says what it is, and pushes one of the patterns of
// `collectives.h` on the stream.
#include <vector>

#include "communicator.h"

namespace npu_sim {
namespace {

/// "all_gather of 6 fp32": what must be equal on all ranks.
std::string text_of(const char* name, uint64_t count, HcclDataType type, const std::string& more = "") {
  return format("%s of %lu %s%s", name, count, name_of(type), more.c_str());
}

std::string with_op(HcclReduceOp op) { return format(" (%s)", name_of(op)); }

std::string from_root(uint32_t root) { return format(" at root %u", root); }

/// What every reduction refuses, as the documentation of HCCL lists the types.
HcclResult check_reduction(const std::string& text, HcclDataType type, HcclReduceOp op) {
  if (!reducible(type))
    return refuse(HCCL_E_NOT_SUPPORT, text + ": HCCL reduces int8, int16, int32, int64, fp16, fp32 and bf16");
  if (*name_of(op) == '\0') return refuse(HCCL_E_PARA, text + ": no such reduction");
  return HCCL_SUCCESS;
}

Piece piece(const void* data, uint64_t count, HcclDataType type) {
  return {static_cast<char*>(const_cast<void*>(data)), static_cast<size_t>(count) * size_of(type)};
}

/// Equal pieces of a buffer, one for each rank.
std::vector<Piece> slices(const void* data, uint64_t count, HcclDataType type, uint32_t ranks) {
  std::vector<Piece> list;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    Piece one = piece(data, count, type);
    one.data += rank * one.size;
    list.push_back(one);
  }
  return list;
}

/// Pieces of a buffer with counts and displacements in elements, as arrays of 64-bit numbers.
std::vector<Piece> slices(const void* data, const void* counts, const void* displacements, HcclDataType type,
                          uint32_t ranks) {
  std::vector<Piece> list;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    Piece one = piece(data, static_cast<const uint64_t*>(counts)[rank], type);
    one.data += static_cast<const uint64_t*>(displacements)[rank] * size_of(type);
    list.push_back(one);
  }
  return list;
}

/// For a call on a communicator that isn't known; `push_call` refuses it.
uint32_t ranks_of(HcclComm handle) {
  const auto comm = communicator_of(handle);
  return comm == nullptr ? 0 : comm->region->ranks;
}

std::vector<Piece> with(std::vector<Piece> pieces, Piece another) {
  pieces.push_back(another);
  return pieces;
}

std::vector<Piece> both(std::vector<Piece> pieces, const std::vector<Piece>& others) {
  pieces.insert(pieces.end(), others.begin(), others.end());
  return pieces;
}

}  // namespace
}  // namespace npu_sim

using namespace npu_sim;

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm,
                         aclrtStream stream) {
  const std::string text = text_of("all_gather", count, type);
  const Piece mine = piece(send, count, type);
  const auto into = slices(receive, count, type, ranks_of(comm));
  return push_call(comm, stream, text, with(into, mine),
                   [=](SharedRegion& region) { return share(region, text, mine, into); });
}

HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* displacements,
                          HcclDataType type, HcclComm comm, aclrtStream stream) {
  const std::string text = format("all_gather_v of %s", name_of(type));
  const Piece mine = piece(send, count, type);
  const auto into = slices(receive, counts, displacements, type, ranks_of(comm));
  return push_call(comm, stream, text, with(into, mine),
                   [=](SharedRegion& region) { return share(region, text, mine, into); });
}

HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  const std::string text = text_of("broadcast", count, type, from_root(root));
  const Piece whole = piece(data, count, type);
  return push_call(comm, stream, text, {whole}, [=](SharedRegion& region) {
    std::vector<Piece> into(region.ranks);
    if (region.rank != root) into[root] = whole;
    return share(region, text, region.rank == root ? whole : Piece{}, into);
  });
}

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  const std::string text = text_of("all_reduce", count, type, with_op(op));
  if (HcclResult refused = check_reduction(text, type, op)) return refused;
  const Piece mine = piece(send, count, type), into = piece(receive, count, type);
  return push_call(comm, stream, text, {mine, into},
                   [=](SharedRegion& region) { return combine(region, text, mine, into, type, op); });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  const std::string text = text_of("reduce", count, type, with_op(op) + from_root(root));
  if (HcclResult refused = check_reduction(text, type, op)) return refused;
  const Piece mine = piece(send, count, type), into = piece(receive, count, type);
  return push_call(comm, stream, text, {mine}, [=](SharedRegion& region) {
    return combine(region, text, mine, region.rank == root ? into : Piece{}, type, op);
  });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  const std::string text = text_of("reduce_scatter", count, type, with_op(op));
  if (HcclResult refused = check_reduction(text, type, op)) return refused;
  const auto out = slices(send, count, type, ranks_of(comm));
  const Piece into = piece(receive, count, type);
  return push_call(comm, stream, text, with(out, into),
                   [=](SharedRegion& region) { return combine_parts(region, text, out, into, type, op); });
}

HcclResult HcclReduceScatterV(void* send, const void* counts, const void* displacements, void* receive, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  const std::string text = format("reduce_scatter_v of %s (%s)", name_of(type), name_of(op));
  if (HcclResult refused = check_reduction(text, type, op)) return refused;
  const auto out = slices(send, counts, displacements, type, ranks_of(comm));
  const Piece into = piece(receive, count, type);
  return push_call(comm, stream, text, with(out, into),
                   [=](SharedRegion& region) { return combine_parts(region, text, out, into, type, op); });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
  const std::string text = text_of("scatter", count, type, from_root(root));
  const Piece into = piece(receive, count, type);
  return push_call(comm, stream, text, {into}, [=](SharedRegion& region) {
    std::vector<Piece> in(region.ranks);
    in[root] = into;
    const bool sends = region.rank == root;
    return deal(region, text, sends ? slices(send, count, type, region.ranks) : std::vector<Piece>(region.ranks), in);
  });
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType type, const void* receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  const std::string text = text_of("all_to_all", send_count, type);
  if (send_count != receive_count || type != receive_type)
    return refuse(HCCL_E_PARA, text + " into another count or type");
  const auto out = slices(send, send_count, type, ranks_of(comm)),
             in = slices(receive, send_count, type, ranks_of(comm));
  return push_call(comm, stream, text, both(out, in),
                   [=](SharedRegion& region) { return deal(region, text, out, in); });
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_displacements, HcclDataType type,
                         const void* receive, const void* receive_counts, const void* receive_displacements,
                         HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  const std::string text = format("all_to_all_v of %s", name_of(type));
  if (type != receive_type) return refuse(HCCL_E_PARA, text + " into another type");
  const auto out = slices(send, send_counts, send_displacements, type, ranks_of(comm));
  const auto in = slices(receive, receive_counts, receive_displacements, type, ranks_of(comm));
  return push_call(comm, stream, text, both(out, in),
                   [=](SharedRegion& region) { return deal(region, text, out, in); });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return push_call(comm, stream, "barrier", {}, [](SharedRegion& region) { return meet(region, "barrier"); });
}
