// Copying much memory while others compute: past the caches, which are theirs.
#include <cstdint>
#include <cstring>

#include "export.h"

#if defined(__SSE2__)
#include <emmintrin.h>

namespace {

// Memory is fastest where several pages are open at once.
constexpr int64_t kPage = 4096, kPages = 4, kLine = 64;

inline void stream_line(uint8_t *target, const uint8_t *source) {
    const auto *from = reinterpret_cast<const __m128i *>(source);
    auto *to = reinterpret_cast<__m128i *>(target);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2),
                  d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}

} // namespace
#endif

// Of memory that does not overlap.
APPLIANCE_EXPORT void appliance_copy(uint8_t *target, const uint8_t *source, int64_t bytes) {
#if defined(__SSE2__)
    if (bytes >= kPages * kPage + kLine) {
        const int64_t head = -reinterpret_cast<intptr_t>(target) & (kLine - 1);
        std::memcpy(target, source, size_t(head));
        int64_t at = head;
        for (; at + kPages * kPage <= bytes; at += kPages * kPage)
            for (int64_t line = at; line < at + kPage; line += kLine)
                for (int64_t page = 0; page < kPages; ++page)
                    stream_line(target + line + page * kPage, source + line + page * kPage);
        target += at, source += at, bytes -= at;
        // Before the caller says that it is there.
        _mm_sfence();
    }
#endif
    std::memcpy(target, source, size_t(bytes));
}
