// An official TypeScript client, driven by a plan on stdin; what it saw goes to stdout.
//
// plan: {modules, sdk: 1 | 2, mode, calls: [{name, arguments}]} and either {url, token}
// or {command, args, env}. Answer: {protocol, tools, results}, or {refused} if it could not connect.
import { createRequire } from "node:module";
import { join } from "node:path";
import { text } from "node:stream/consumers";

const plan = JSON.parse(await text(process.stdin));
const load = createRequire(join(plan.modules, "from-here.js"));

function clientOf({ sdk, mode }) {
  const about = { name: "engram-tests", version: "1" };
  if (sdk === 1) {
    const { Client } = load("@modelcontextprotocol/sdk/client/index.js");
    return new Client(about);
  }
  const { Client } = load("@modelcontextprotocol/client");
  return new Client(about, { versionNegotiation: { mode } });
}

function transportOf({ sdk, url, token, command, args, env }) {
  if (command) {
    const { StdioClientTransport } = load(
      sdk === 1 ? "@modelcontextprotocol/sdk/client/stdio.js" : "@modelcontextprotocol/client/stdio",
    );
    return new StdioClientTransport({ command, args, env, stderr: "inherit" });
  }
  const { StreamableHTTPClientTransport } = load(
    sdk === 1 ? "@modelcontextprotocol/sdk/client/streamableHttp.js" : "@modelcontextprotocol/client",
  );
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } });
}

async function seen() {
  const client = clientOf(plan);
  const transport = transportOf(plan);
  try {
    await client.connect(transport);
  } catch (error) {
    return { refused: String(error) };
  }
  // Listing first: from then on the client checks every result against its tool's output schema.
  const { tools } = await client.listTools();
  const results = [];
  for (const call of plan.calls) results.push(await client.callTool(call));
  const protocol = client.getNegotiatedProtocolVersion?.() ?? transport.protocolVersion ?? null;
  await client.close();
  return { protocol, tools, results };
}

process.stdout.write(JSON.stringify(await seen()));
