#pragma once

#define APPLIANCE_EXPORT extern "C" __attribute__((visibility("default")))
