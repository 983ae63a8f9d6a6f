/*
 * version - what must match between two processes.
 *
 * Role        the wire's major and minor version, the shared layouts' version. A peer one minor
 *             version away still works; another major version or layout is refused.
 */
#ifndef KVIST_VERSION_H
#define KVIST_VERSION_H

#define KVIST_WIRE_MAJOR     1U
#define KVIST_WIRE_MINOR     2U
#define KVIST_LAYOUT_VERSION 2U

#endif
