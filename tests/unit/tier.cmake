# The workers and the NVMe tier. Included by units.cmake.
kvist_add_unit(workers unit/workers_test.c kvist_tier)
if(KVIST_WITH_ROCKSDB_ENABLED)
    add_library(kvist_tier_rig STATIC support/tier_rig.c)
    target_link_libraries(kvist_tier_rig PUBLIC kvist_tier)
    kvist_add_unit(tier unit/tier_test.c kvist_tier_rig)
endif()
