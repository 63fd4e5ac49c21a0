// Sharing rows between threads through the OpenMP runtime that torch has already loaded, so that one pool of threads
// serves both. The symbols are weak and no library is named: where no such runtime is loaded, the caller does all.

#include <stdint.h>

extern "C" {
void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
int omp_get_max_threads(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
int omp_in_parallel(void) __attribute__((weak));
}

namespace {

typedef void (*Range)(void *const *pointers, const int64_t *sizes, int64_t begin, int64_t end);

struct Job {
  Range range;
  void *const *pointers;
  const int64_t *sizes;
  int64_t items;
};

void work(void *argument) {
  const Job &job = *static_cast<const Job *>(argument);
  int64_t threads = omp_get_num_threads(), at = omp_get_thread_num();
  int64_t begin = job.items * at / threads, end = job.items * (at + 1) / threads;
  if (begin < end) job.range(job.pointers, job.sizes, begin, end);
}

// Runs `range` over [0, items); a thread gets at least `grain` items.
void parallel(Range range, void *const *pointers, const int64_t *sizes, int64_t items, int64_t grain) {
  if (items <= 0) return;
  int64_t wanted = (items + grain - 1) / grain;
  if (GOMP_parallel && omp_get_max_threads && omp_get_num_threads && omp_get_thread_num && omp_in_parallel) {
    int64_t threads = omp_get_max_threads();
    if (wanted < threads) threads = wanted;
    if (threads > 1 && !omp_in_parallel()) {
      Job job{range, pointers, sizes, items};
      GOMP_parallel(work, &job, unsigned(threads), 0);
      return;
    }
  }
  range(pointers, sizes, 0, items);
}

}  // namespace
