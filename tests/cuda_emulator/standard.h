// Before a kernel's constants are defined, whose short names the standard library uses too.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>
#include <vector>

