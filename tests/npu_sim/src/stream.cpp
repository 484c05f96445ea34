#include "stream.h"

#include <unistd.h>

#include "gil.h"
#include "options.h"
#include "trace.h"

namespace npu_sim {

// ----------------------------------------------------------------------------------------------------------------
// Event

uint64_t Event::begin_record() {
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.insert(++latest_);
  return latest_;
}

void Event::finish_record(uint64_t generation, const Failure& of_stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.erase(generation);
  time_ = Clock::now();
  failure_ = of_stream;
  changed_.notify_all();
}

uint64_t Event::latest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

Failure Event::wait(uint64_t generation) {
  const GilRelease released;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return pending_.count(generation) == 0; });
  return failure_;
}

bool Event::reached(uint64_t generation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pending_.count(generation) == 0;
}

Clock::time_point Event::time() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

// ---------------------------------------------------------------------------------------------------------------
// Stream

Stream::Stream(int device, int number)
    : device(device),
      number(number),
      random_(options().seed * 1000003 + static_cast<uint64_t>(options().rank) * 1009 + static_cast<uint64_t>(number)),
      thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    queued_.notify_one();
  }
  const GilRelease released;
  thread_.join();
}

void Stream::push(std::string name, Task task, After after_failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++pushed_;
  queue_.push_back({std::move(name), std::move(task), after_failure});
  queued_.notify_one();
}

bool Stream::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

Failure Stream::failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

Failure Stream::synchronize(std::chrono::milliseconds limit) {
  const GilRelease released;
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = pushed_;
  const auto reached = [&] { return done_ >= target; };
  if (limit == std::chrono::milliseconds::max()) {
    idle_.wait(lock, reached);
  } else if (!idle_.wait_for(lock, limit, reached)) {
    return {ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
            format("stream %d isn't done within %lld ms", number, static_cast<long long>(limit.count()))};
  }
  return failure_;
}

void Stream::record(const std::shared_ptr<Event>& event) {
  const uint64_t generation = event->begin_record();
  if (tracing()) trace(format("record stream=%d event=%d generation=%lu", number, event->number, generation));
  const auto task = [this, event, generation] {
    event->finish_record(generation, failure());
    return Failure{};
  };
  push("record", task, After::run);  // else whoever waits for the event would never hear of the failure
}

void Stream::wait(const std::shared_ptr<Event>& event) {
  const uint64_t generation = event->latest();
  if (tracing()) trace(format("wait stream=%d event=%d generation=%lu", number, event->number, generation));
  push("wait", [event, generation] { return event->wait(generation); });
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    const uint64_t sequence = done_;
    const bool skipped = failure_ && next.after_failure == After::skip;
    lock.unlock();

    Failure found;
    if (!skipped) {
      if (options().delay_us > 0) usleep(static_cast<useconds_t>(random_() % options().delay_us));
      if (tracing()) trace(format("start stream=%d task=%lu name=%s", number, sequence, next.name.c_str()));
      found = next.task();
      if (tracing()) trace(format("end stream=%d task=%lu", number, sequence));
    }
    next = {};  // what the task holds is let go before the stream counts as done

    lock.lock();
    if (found && !failure_) failure_ = found;
    ++done_;
    idle_.notify_all();
  }
}

}  // namespace npu_sim
