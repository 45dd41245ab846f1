// node graphile_drain.mjs SOCKET_FOLDER DATABASE JOBS — with the local queue, as its documentation advises.
import { makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";

const [host, database, jobs] = [process.argv[2], process.argv[3], Number(process.argv[4])];
const pgPool = new pg.Pool({ host, database, user: "engram", max: 20 });
const quiet = { log: () => {} };
const utils = await makeWorkerUtils({ pgPool });
await utils.migrate();
await pgPool.query(
  "SELECT graphile_worker.add_jobs(ARRAY(SELECT json_populate_record(NULL::graphile_worker.job_spec," +
    " json_build_object('identifier', 'noop', 'payload', json_build_object('n', n))) FROM generate_series(1, $1) n))",
  [jobs],
);
let done = 0;
const started = performance.now();
const runner = await run({
  pgPool,
  taskList: { noop: async () => { done += 1; } },
  noHandleSignals: true,
  preset: { worker: {
    concurrentJobs: 24, pollInterval: 100, localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0,
    logger: new (await import("graphile-worker")).Logger(() => () => {}),
  } },
});
const left = async () => Number((await pgPool.query("SELECT count(*) n FROM graphile_worker.jobs")).rows[0].n);
while (done < jobs || (await left()) > 0) await new Promise((resume) => setTimeout(resume, 5));
console.log(jobs / ((performance.now() - started) / 1000));
await runner.stop();
await utils.release();
process.exit(0);
