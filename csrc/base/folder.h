/* SPDX-License-Identifier: Apache-2.0
 *
 * folder.h: where libcore lies, beside which other libraries are looked for.
 */
#ifndef RPI_FOLDER_H
#define RPI_FOLDER_H

/* The folder of libcore, or of the program that it is linked into, from the root and with a slash
 * at its end; "" where that is unknown. Asked when libcore is loaded: later the program may work in
 * another folder, and names that the loader was given would mean what lies there. */
const char *rpi_own_folder(void);

#endif
