// HCCL: sends, receives and groups of calls.
#include <vector>

#include "communicator.h"
#include "messages.h"

namespace npu_sim {
namespace {

/// A thread's open group. Its sends and receives are held back, since each of them alone could wait for one that comes
/// later; collectives need no holding back.
struct Group {
  struct Held {
    HcclComm comm;
    aclrtStream stream;
    std::vector<Message> messages;
  };
  int depth = 0;
  std::vector<Held> held;
};

thread_local Group group;

HcclResult push_messages(HcclComm comm, aclrtStream stream, const std::vector<Message>& messages) {
  std::string text;
  std::vector<Piece> buffers;
  for (const Message& one : messages) {
    text += format("%s%s %zu bytes %s %u", text.empty() ? "" : ", ", one.send ? "send" : "receive", one.size,
                   one.send ? "to" : "from", one.peer);
    buffers.push_back({one.buffer, one.size});
  }
  return push_call(comm, stream, text, buffers,
                   [messages](SharedRegion& region) { return exchange(region, messages); });
}

HcclResult add(const Message& message, HcclComm comm, aclrtStream stream) {
  if (group.depth == 0) return push_messages(comm, stream, {message});
  for (Group::Held& held : group.held) {
    if (held.comm == comm && held.stream == stream) {
      held.messages.push_back(message);
      return HCCL_SUCCESS;
    }
  }
  group.held.push_back({comm, stream, {message}});
  return HCCL_SUCCESS;
}

Message message(bool send, void* buffer, uint64_t count, HcclDataType type, uint32_t peer) {
  return {send, peer, static_cast<char*>(buffer), static_cast<size_t>(count) * size_of(type)};
}

}  // namespace
}  // namespace npu_sim

using namespace npu_sim;

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return add(message(true, buffer, count, type, peer), comm, stream);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return add(message(false, buffer, count, type, peer), comm, stream);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  std::vector<Message> messages;
  for (uint32_t i = 0; i < count; ++i) {
    const HcclSendRecvItem& item = items[i];
    messages.push_back(message(item.sendRecvType == HCCL_SEND, item.buf, item.count, item.dataType, item.remoteRank));
  }
  return push_messages(comm, stream, messages);
}

HcclResult HcclGroupStart() {
  ++group.depth;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  if (group.depth == 0) return refuse(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
  if (--group.depth > 0) return HCCL_SUCCESS;
  const std::vector<Group::Held> held = std::move(group.held);
  group.held.clear();
  for (const Group::Held& one : held) {
    if (HcclResult refused = push_messages(one.comm, one.stream, one.messages)) return refused;
  }
  return HCCL_SUCCESS;
}
