// Pinned memory of the host, whose copies arrive late.
//
// Simulated: a copy into pinned memory is not there before the host has waited for it (the memory is NaN until then),
// and one out of pinned memory finds what the host has overwritten before it waited. Not simulated: its limited size.
#pragma once
#include <c10/core/Allocator.h>

#include "order.h"

namespace sim {
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

void copy_out_later(int stream, uint64_t tick, char* pinned, std::string bytes);  // arrives in the pinned memory
std::string copy_in_later(int stream, uint64_t tick, char* pinned, size_t size);  // what the copy finds there
void arrive(const Order& host);  // what the host has waited for; with the mutex held
}  // namespace sim
