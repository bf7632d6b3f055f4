#include "step.h"

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace appliance {

Memory::Memory(size_t bytes) {
    constexpr size_t huge = size_t(2) << 20, line = 64;
    const size_t unit = bytes >= huge ? huge : line;
    const size_t size = (bytes + unit - 1) / unit * unit;
    bytes_.reset(static_cast<uint8_t *>(std::aligned_alloc(unit, size ? size : unit)));
    if (!bytes_)
        throw std::bad_alloc();
#if defined(__linux__)
    if (unit == huge)
        madvise(bytes_.get(), size, MADV_HUGEPAGE);
#endif
}

} // namespace appliance
