# The NVMe tier and the workers. Included by storage/CMakeLists.txt.
add_library(kvist_tier STATIC
    ${CMAKE_CURRENT_LIST_DIR}/busy.c
    ${CMAKE_CURRENT_LIST_DIR}/workers.c)
target_link_libraries(kvist_tier PUBLIC kvist_base kvist_key)
if(KVIST_WITH_ROCKSDB_ENABLED)
    target_sources(kvist_tier PRIVATE
        ${CMAKE_CURRENT_LIST_DIR}/disk.c
        ${CMAKE_CURRENT_LIST_DIR}/extent.c
        ${CMAKE_CURRENT_LIST_DIR}/extent_file.c
        ${CMAKE_CURRENT_LIST_DIR}/extent_share.c
        ${CMAKE_CURRENT_LIST_DIR}/record.c
        ${CMAKE_CURRENT_LIST_DIR}/tier.c
        ${CMAKE_CURRENT_LIST_DIR}/tier_codec.c
        ${CMAKE_CURRENT_LIST_DIR}/tier_disk.c
        ${CMAKE_CURRENT_LIST_DIR}/tier_index.c
        ${CMAKE_CURRENT_LIST_DIR}/tier_keeper.c
        ${CMAKE_CURRENT_LIST_DIR}/tier_pool.c)
    target_include_directories(kvist_tier SYSTEM PRIVATE ${KVIST_ROCKSDB_INCLUDE})
    target_link_libraries(kvist_tier PUBLIC ${KVIST_ROCKSDB_LIBRARY})
else()
    target_sources(kvist_tier PRIVATE ${CMAKE_CURRENT_LIST_DIR}/tier_none.c)
endif()
