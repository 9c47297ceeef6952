/* The program: everything is behind mt_cli_main. */
#include "train/cli.h"

int main(int argc, char **argv)
{
    return mt_cli_main(argc, argv);
}
