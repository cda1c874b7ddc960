# The two commands: `make demo` and `make check`. Everything else is CMake's.
BUILD ?= build
PREFIX ?= /usr/local
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CMAKE_FLAGS ?=

.PHONY: all build demo check bench install clean

all: build

build:
	@scripts/deps.sh build
	@cmake -S . -B $(BUILD) -G Ninja -DBUILD_TESTING=OFF -DCMAKE_INSTALL_PREFIX=$(PREFIX) $(CMAKE_FLAGS) >/dev/null
	@echo "building in $(BUILD)"
	@cmake --build $(BUILD) -j $(JOBS) -- --quiet

# Trains on seven classes, then tunes that checkpoint on all ten; DEMO=short is the form for CI.
demo: build
	@MUSTER=$(BUILD)/muster scripts/demo.sh

check:
	@scripts/deps.sh check
	@cmake -S . -B $(BUILD) -G Ninja -DBUILD_TESTING=ON -DCMAKE_INSTALL_PREFIX=$(PREFIX) $(CMAKE_FLAGS) >/dev/null
	@echo "building in $(BUILD)"
	@cmake --build $(BUILD) -j $(JOBS) -- --quiet
	@ctest --test-dir $(BUILD) --output-on-failure --no-label-summary -j $(JOBS)

# Against PyTorch and MPI on the same cores; ROUNDS, WORKLOADS and QUICK are bench/run.py's.
bench:
	@scripts/deps.sh bench
	@$(MAKE) --no-print-directory build
	@/usr/bin/python3 bench/run.py --build $(BUILD)

install:
	@test -f $(BUILD)/CMakeCache.txt || $(MAKE) --no-print-directory build
	@cmake --build $(BUILD) -j $(JOBS) -- --quiet
	@DESTDIR=$(DESTDIR) cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf $(BUILD)
