# The store and its parts. Included by units.cmake.
add_library(kvist_test_engine STATIC support/engine.c support/vault.c)
target_link_libraries(kvist_test_engine PUBLIC kvist_storage kvist_key kvist_test_support)

kvist_add_unit(adopt unit/adopt_test.c kvist_test_engine)
kvist_add_unit(kept unit/kept_test.c kvist_test_engine)
kvist_add_unit(detach unit/detach_test.c kvist_test_engine)
kvist_add_unit(evict unit/evict_test.c kvist_test_engine)
kvist_add_unit(tenant unit/tenant_test.c kvist_test_engine)
kvist_add_unit(grants unit/grants_test.c kvist_test_engine)
kvist_add_unit(map unit/map_test.c kvist_test_engine)
kvist_add_unit(page unit/page_test.c kvist_test_engine)
kvist_add_unit(policies unit/policies_test.c kvist_eviction)
kvist_add_unit(policy unit/policy_test.c kvist_eviction)
kvist_add_unit(replay_store unit/replay_store_test.c
    kvist_test_engine kvist_tool_core kvist_test_traces)
kvist_add_unit(spare unit/spare_test.c kvist_test_engine)
kvist_add_unit(store unit/store_test.c kvist_test_engine)
kvist_add_unit(yield unit/yield_test.c kvist_test_engine)
if(KVIST_WITH_ROCKSDB_ENABLED)
    kvist_add_unit(adopt_tier unit/adopt_tier_test.c kvist_test_engine)
    kvist_add_unit(store_tier unit/store_tier_test.c kvist_test_engine)
    kvist_add_unit(store_fault unit/store_fault_test.c kvist_test_engine)
    set_tests_properties(store_fault PROPERTIES TIMEOUT 240)
endif()

# What the loop pays, in figures; run by hand.
add_executable(store_bench bench/store_bench.c)
target_link_libraries(store_bench PRIVATE kvist_test_engine)
