#include "messages.h"

#include <algorithm>
#include <cstring>

namespace npu_sim {
namespace {

/// A message on its way, cut into parts of one box each. An empty message is one empty part.
class Transfer {
 public:
  Transfer(SharedRegion& region, const Message& message)
      : message_(message),
        box_(message.send ? &region.box(region.rank, message.peer) : &region.box(message.peer, region.rank)) {}

  bool done() const { return started_ && offset_ == message_.size; }
  const Box* box() const { return box_; }
  bool sends() const { return message_.send; }
  uint32_t peer() const { return message_.peer; }

  /// Whether `step` can move a part now.
  bool ready() const {
    const bool full = box_->written.load(std::memory_order_acquire) != box_->read.load(std::memory_order_acquire);
    return full != message_.send;
  }

  Failure step() {
    if (!message_.send && !started_ && box_->total != message_.size) {
      return {ACL_ERROR_RT_INTERNAL_ERROR,
              format("rank %u sends %lu bytes where %zu are received", message_.peer, box_->total, message_.size)};
    }
    started_ = true;
    const size_t part = std::min(Box::kBytes, message_.size - offset_);
    if (message_.send) {
      box_->total = message_.size;
      std::memcpy(box_->data, message_.buffer + offset_, part);
    } else {
      std::memcpy(message_.buffer + offset_, box_->data, part);
    }
    (message_.send ? box_->written : box_->read).fetch_add(1, std::memory_order_release);
    offset_ += part;
    return {};
  }

 private:
  Message message_;
  Box* box_;
  size_t offset_ = 0;
  bool started_ = false;
};

}  // namespace

Failure exchange(SharedRegion& region, const std::vector<Message>& messages) {
  std::vector<Transfer> open;
  for (const Message& message : messages) open.emplace_back(region, message);

  // Of the open transfers of one box and direction, the first may move; later ones wait for it.
  const auto movable = [&](size_t i) {
    for (size_t earlier = 0; earlier < i; ++earlier) {
      if (open[earlier].box() == open[i].box() && open[earlier].sends() == open[i].sends()) return false;
    }
    return open[i].ready();
  };
  const auto next = [&] {
    size_t i = 0;
    while (i < open.size() && !movable(i)) ++i;
    return i;
  };
  const auto involved = [&](uint32_t peer) {
    return std::any_of(open.begin(), open.end(), [peer](const Transfer& one) { return one.peer() == peer; });
  };
  while (!open.empty()) {
    if (Failure failure = region.await(involved, [&] { return next() < open.size(); })) return failure;
    const size_t i = next();
    if (Failure failure = open[i].step()) return failure;
    if (open[i].done()) open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return {};
}

}  // namespace npu_sim
