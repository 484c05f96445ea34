// Streams and events, without the C interface (`acl_stream.cpp`).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "failure.h"

namespace npu_sim {

using Clock = std::chrono::steady_clock;

/// What an event marks: a point of the stream that it was last recorded on. Each recording is a generation of its own,
/// so a wait that was issued for an earlier one isn't affected by later ones.
class Event {
 public:
  explicit Event(int number) : number(number) {}

  uint64_t begin_record();                                            // host: the new generation, not reached yet
  void finish_record(uint64_t generation, const Failure& of_stream);  // stream: it is reached
  uint64_t latest();                                                  // 0 = never recorded
  Failure wait(uint64_t generation);
  bool reached(uint64_t generation);
  Clock::time_point time();  // when the latest finished recording was reached

  const int number;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t latest_ = 0;
  std::set<uint64_t> pending_;
  Clock::time_point time_{};
  Failure failure_;
};

/// A queue of tasks and the thread that does them one after the other. Once a task has failed, the following ones are
/// skipped and `synchronize` says so for good, as a device in "stop on failure" mode does; the failure follows events
/// into the streams that wait for them.
class Stream {
 public:
  using Task = std::function<Failure()>;
  enum class After { skip, run };  // what to do once an earlier task has failed

  Stream(int device, int number);
  ~Stream();  // finishes what is queued

  void push(std::string name, Task task, After after_failure = After::skip);
  bool idle();
  /// Wait until all that was queued before has been done. Returns the stream's failure, or a timeout.
  Failure synchronize(std::chrono::milliseconds limit = std::chrono::milliseconds::max());

  void record(const std::shared_ptr<Event>& event);
  void wait(const std::shared_ptr<Event>& event);

  const int device;
  const int number;

 private:
  struct Queued {
    std::string name;
    Task task;
    After after_failure;
  };

  void run();
  Failure failure();

  std::mutex mutex_;
  std::condition_variable queued_, idle_;
  std::deque<Queued> queue_;
  uint64_t pushed_ = 0, done_ = 0;
  bool stop_ = false;
  Failure failure_;
  std::mt19937_64 random_;
  std::thread thread_;  // last: it uses all of the above
};

/// The objects behind the handles that the wheel holds. A handle that was destroyed is no longer known.
template <class Object>
class Handles {
 public:
  template <class... Arguments>
  void* create(Arguments&&... arguments) {
    auto object = std::make_shared<Object>(std::forward<Arguments>(arguments)...);
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_[object.get()] = object;
    return object.get();
  }
  std::shared_ptr<Object> find(const void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Object> remove(const void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    auto object = found->second;
    objects_.erase(found);
    return object;
  }
  std::vector<std::shared_ptr<Object>> all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Object>> list;
    for (const auto& entry : objects_) list.push_back(entry.second);
    return list;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::shared_ptr<Object>> objects_;
};

/// The stream behind a handle; null means the default stream of the current device. Null if there is none.
std::shared_ptr<Stream> stream_of(void* handle);

/// All streams of a device.
std::vector<std::shared_ptr<Stream>> streams_of(int device);

}  // namespace npu_sim
