/* Writes a tiny GGUF with random weights and llama.cpp's test tokenizer, for tests that need a
 * file: tiny_model FILE */
#include "llama_help.h"

int main(int argc, char **argv)
{
    struct tiny_spec spec = tiny_plain;

    if (argc != 2)
        return 2;
    llama_backend_init();
    spec.words = 1;
    struct llama_model *model = tiny_model(&spec);
    llama_model_save_to_file(model, argv[1]);
    llama_model_free(model);
    return 0;
}
