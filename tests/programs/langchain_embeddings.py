"""langchain-openai's embeddings of texts by a server, as JSON: URL, then JSON of the texts.

Without `check_embedding_ctx_length=False` it would send ids of OpenAI's vocabulary.
"""

import json
import sys

from langchain_openai import OpenAIEmbeddings

if __name__ == "__main__":
    url, texts = sys.argv[1:]
    embeddings = OpenAIEmbeddings(
        base_url=f"{url}/v1",
        api_key="x",
        model="any",
        dimensions=16,
        check_embedding_ctx_length=False,
        model_kwargs={"extra_body": {"pooling": "mean"}},
    )
    (first, *_) = wanted = json.loads(texts)
    print(json.dumps([embeddings.embed_documents(wanted), embeddings.embed_query(first)]))
