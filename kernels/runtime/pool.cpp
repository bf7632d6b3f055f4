#include "pool.h"

#include <cstdlib>

#include <unistd.h>

namespace appliance {
namespace {

// How often to look before another thread is let onto the core; and, between steps, before a thread goes to sleep: about a
// tenth of a millisecond. Five times as long made no difference that could be measured.
constexpr int kSpins = 1500;
constexpr int kSpinsBeforeSleep = 4000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline uint32_t step_of(uint64_t word) { return uint32_t(word >> 32); }
inline uint32_t count_of(uint64_t word) { return uint32_t(word); }
inline uint64_t word_of(uint32_t step, uint32_t count) { return uint64_t(step) << 32 | count; }

} // namespace

Pool::Pool(int threads, size_t max_phases)
    : threads_(threads), process_(getpid()), max_phases_(max_phases), phases_(new Phase[max_phases]) {
    try {
        for (int thread = 1; thread < threads; ++thread)
            workers_->threads.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() {
    if (getpid() == process_)
        stop();
    else
        workers_.release();
}

void Pool::stop() {
    stopping_ = true;
    generation_.value.fetch_add(uint64_t(1) << 32);
    wake();
    for (std::thread &worker : workers_->threads)
        worker.join();
}

void Pool::run(Job &job, const std::vector<int> &chunks) {
    if (chunks.size() > max_phases_)
        std::abort();
    ++step_;
    job_.store(&job, std::memory_order_relaxed);
    for (size_t i = 0; i < chunks.size(); ++i) {
        phases_[i].done.value.store(word_of(step_, 0), std::memory_order_relaxed);
        phases_[i].claimed.value.store(word_of(step_, 0), std::memory_order_release);
        phases_[i].total.value.store(word_of(step_, uint32_t(chunks[i])), std::memory_order_release);
    }
    const uint64_t generation = word_of(step_, uint32_t(chunks.size()));
    generation_.value.store(generation, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) && getpid() == process_)
        wake();
    walk(0, generation);
}

void Pool::wake() {
    { std::lock_guard<std::mutex> lock(workers_->mutex); } // whoever is about to sleep does so before it is notified
    workers_->woken.notify_all();
}

void Pool::work(int thread) {
    uint64_t generation = 0;
    for (;;) {
        generation = wait_for_step(generation);
        if (stopping_)
            return;
        walk(thread, generation);
    }
}

uint64_t Pool::wait_for_step(uint64_t last) {
    uint64_t now;
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if ((now = generation_.value.load(std::memory_order_acquire)) != last)
            return now;
        pause();
    }
    std::unique_lock<std::mutex> lock(workers_->mutex);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    workers_->woken.wait(lock, [&] { return (now = generation_.value.load(std::memory_order_seq_cst)) != last; });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    return now;
}

void Pool::walk(int thread, uint64_t generation) {
    const int phases = int(count_of(generation));
    for (int index = 0; index < phases; ++index)
        if (!run_phase(index, thread, step_of(generation)))
            return;
}

// False where the step has ended meanwhile.
bool Pool::run_phase(int index, int thread, uint32_t step) {
    Phase &phase = phases_[index];
    const uint64_t total = phase.total.value.load(std::memory_order_acquire);
    if (step_of(total) != step)
        return false;
    uint64_t claimed = phase.claimed.value.load(std::memory_order_acquire);
    while (step_of(claimed) == step && count_of(claimed) < count_of(total)) {
        if (!phase.claimed.value.compare_exchange_weak(claimed, claimed + 1, std::memory_order_acq_rel))
            continue;
        job_.load(std::memory_order_relaxed)->run_chunk(index, int(count_of(claimed)), thread);
        phase.done.value.fetch_add(1, std::memory_order_acq_rel);
        claimed = phase.claimed.value.load(std::memory_order_acquire);
    }
    for (int spins = 0;; ++spins) {
        const uint64_t done = phase.done.value.load(std::memory_order_acquire);
        if (step_of(done) != step)
            return false;
        if (count_of(done) >= count_of(total))
            return true;
        if (spins < kSpins)
            pause();
        else
            std::this_thread::yield();
    }
}

} // namespace appliance
