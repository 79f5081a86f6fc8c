from .smollm2 import packaged_llm as packaged_llm
