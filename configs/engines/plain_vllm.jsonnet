// Servers that you start with `vllm serve`, on this machine or others (docs/hardware.md, "Any vLLM server"). Set the
// addresses to yours. With a router, addresses has the router's and servers those of the servers behind it:
//   --override '{engines+: {policy+: {addresses: ["https://router:8443"], servers: ["http://10.0.0.2:8000"]}}}'
{ engines+: { policy: { type: 'plain_vllm', addresses: ['http://127.0.0.1:8000'], key_variable: 'VLLM_API_KEY' } } }
