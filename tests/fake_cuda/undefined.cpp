// What a kernel built with -fsanitize=... calls where C++ leaves the behaviour undefined: the launch
// ends with the line. Own handlers, so that no sanitizer library is needed in the test process.
#include "emu_core.h"

namespace {

// The first member of every record that the compiler passes.
struct Location {
    const char* file;
    uint32_t line, column;
};

[[noreturn]] void undefined(const char* what, const void* record) {
    const Location& at = *(const Location*)record;
    emu::fail(std::string("undefined behaviour: ") + what + " at " + (at.file ? at.file : "?") +
              ":" + std::to_string(at.line));
}

}  // namespace

#define HANDLER(name, what)                                                 \
    extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_##name(void* record) { \
        undefined(what, record);                                            \
    }
// A null, misaligned or too small object; the compiler passes the address as well.
HANDLER(type_mismatch_v1, "an address that is null or not aligned for its type")
HANDLER(out_of_bounds, "an index beyond the array")
HANDLER(shift_out_of_bounds, "a shift by too many bits")
HANDLER(divrem_overflow, "a division by zero")
HANDLER(add_overflow, "a signed sum that overflows")
HANDLER(sub_overflow, "a signed difference that overflows")
HANDLER(mul_overflow, "a signed product that overflows")
HANDLER(negate_overflow, "a signed negation that overflows")
HANDLER(float_cast_overflow, "a float beyond the range of the integer")
HANDLER(builtin_unreachable, "a place that cannot be reached")
