// The threads that walk through the phases of a step.
//
// A step is a list of phases, each a number of chunks that any thread may claim; a phase ends when its chunks are done,
// not when all threads have arrived, so a thread that the system has taken off its core never holds the others up unless
// it has a chunk in hand, and a late one finds nothing left to do. Every word that threads meet on carries the step's
// number: a thread that wakes up in a later step than it went to sleep in notices, and touches nothing else.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace appliance {

// What is walked through. Outlives the pool's run; `run_chunk` is called by several threads at once.
class Job {
  public:
    virtual ~Job() = default;
    virtual void run_chunk(int phase, int chunk, int thread) = 0;
};

class Pool {
  public:
    // `threads` of them, the caller of `run` being one; no run has more than `max_phases`.
    Pool(int threads, size_t max_phases);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return threads_; }
    // Returns when all chunks of all phases are done. In a process forked from the one that made the pool, where its
    // other threads don't exist, the caller does all by itself.
    void run(Job &job, const std::vector<int> &chunks);

  private:
    struct alignas(64) Word {
        std::atomic<uint64_t> value{0};
    };
    struct Phase {
        Word total, claimed, done; // step << 32 | count
    };

    void work(int thread);
    uint64_t wait_for_step(uint64_t last);
    void walk(int thread, uint64_t generation);
    bool run_phase(int index, int thread, uint32_t step);
    void wake();
    void stop();

    const int threads_;
    const int process_;
    const size_t max_phases_;
    const std::unique_ptr<Phase[]> phases_; // never another: a late thread may still look at them
    std::atomic<Job *> job_{nullptr};
    uint32_t step_ = 0;
    Word generation_; // step << 32 | number of phases
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
    // Left alone in a forked child: the threads that the last two remember don't exist there.
    struct Workers {
        std::mutex mutex;
        std::condition_variable woken;
        std::vector<std::thread> threads;
    };
    std::unique_ptr<Workers> workers_{new Workers};
};

} // namespace appliance
